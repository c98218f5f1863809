"""Workers train separate copies of the weights and exchange them every 16 steps.

gradcomp run -n 2 local_steps.py     # for links with a long delay
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_gradcomp as gc

STEPS_PER_EPOCH = 64  # a multiple of 16: a round ends at the end of an epoch, too

strategy = gc.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = (x / 16).reshape(-1, 8, 8, 1).astype("float32")
train = tf.data.Dataset.from_tensor_slices((x[360:], y[360:]))
train = train.shuffle(len(x), seed=0).repeat().batch(64)
test = tf.data.Dataset.from_tensor_slices((x[:360], y[:360])).batch(64)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=gc.CompressedOptimizer(
            keras.optimizers.Adam(),  # each worker has its own state of this one
            compressor="top_k(density=0.05)",
            local_steps=gc.LocalSteps(16, warmup_steps=16),
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
model.fit(
    train,
    epochs=10,
    steps_per_epoch=STEPS_PER_EPOCH,
    validation_data=test,
    callbacks=[gc.callbacks.CompressionMonitor()],  # logs rounds and drift
    verbose=2 if gc.is_chief(strategy) else 0,
)
