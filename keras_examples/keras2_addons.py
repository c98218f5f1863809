"""Keras 2 with tensorflow-addons: LAMB, and the mean of the last weights.

gradcomp run -n 2 keras2_addons.py     # TensorFlow 2.15, Keras 2.15, tensorflow-addons 0.23
"""

import tensorflow as tf
import tensorflow_addons as tfa
from sklearn.datasets import load_digits

import tf_gradcomp as gc

keras = tf.keras
BATCH = 64  # rows of a batch over all workers

strategy = gc.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
options = tf.data.Options()  # each worker takes its part of each batch
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
train = tf.data.Dataset.from_tensor_slices((x[:1440], y[:1440])).shuffle(1440, seed=0)
train = train.batch(BATCH, drop_remainder=True).with_options(options)
test = tf.data.Dataset.from_tensor_slices((x[1440:], y[1440:])).batch(BATCH).with_options(options)

with strategy.scope():
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(256, "relu")])
    model.add(keras.layers.Dense(10))
    # The optimizers of tensorflow-addons go inside.
    averaged = tfa.optimizers.MovingAverage(tfa.optimizers.LAMB(0.01), average_decay=0.9)
    model.compile(
        gc.CompressedOptimizer(averaged),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
model.fit(train, epochs=10, verbose=2 if gc.is_chief(strategy) else 0)
with strategy.scope():
    model.optimizer.assign_average_vars(model.trainable_variables)
_, accuracy = model.evaluate(test, verbose=0)
if gc.is_chief(strategy):
    print(f"Test accuracy of the mean weights {accuracy:.2%}")
