"""Workers train separate copies of the weights and exchange them every 16 steps.

gradcomp run -n 2 local_steps.py     # two workers on this machine
gradcomp simulate local_steps.py -n 4 -c no_compression --local-steps 0 --local-steps 16
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_gradcomp as gc

STEPS_PER_EPOCH = 64  # a round ends at the end of an epoch, too


def digits(batch_size: int, seed: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    data = load_digits()
    images, labels = (data.images[..., None] / 16).astype("float32"), data.target
    rows = tf.data.Dataset.from_tensor_slices((images, labels))
    rows = rows.shuffle(len(images), seed=seed, reshuffle_each_iteration=False)
    train, test = rows.skip(360), rows.take(360)
    train = train.shuffle(len(images), seed=seed).repeat().batch(batch_size)
    return train, test.batch(batch_size)


def build_model() -> keras.Model:
    return keras.Sequential(
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


def compile_model(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])


def simulation_task(batch_size: int = 64, seed: int = 0) -> gc.simulation.Task:
    keras.utils.set_random_seed(seed)
    train, test = digits(batch_size, seed)
    model = build_model()
    compile_model(model, keras.optimizers.Adam())
    return gc.simulation.Task(model, train, STEPS_PER_EPOCH, test)


if __name__ == "__main__":
    strategy = gc.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    train, test = digits(batch_size=64, seed=0)
    with strategy.scope():
        model = build_model()
        optimizer = gc.CompressedOptimizer(
            keras.optimizers.Adam(),  # each worker has its own state of this one
            compressor="top_k(density=0.05)",
            local_steps=gc.LocalSteps(16, warmup_steps=16),
        )
        compile_model(model, optimizer)
    model.fit(
        train,
        epochs=10,
        steps_per_epoch=STEPS_PER_EPOCH,
        validation_data=test,
        callbacks=[gc.callbacks.CompressionMonitor()],  # logs rounds and drift
        verbose=2 if gc.is_chief(strategy) else 0,
    )
