"""Keras 2 with tensorflow-addons: handwritten digits with LAMB, and the mean of the last weights.

    python keras2_addons.py
    gradcomp run -n 2 keras2_addons.py
    gradcomp run -n 2 keras2_addons.py --compressor no_compression
    horovodrun -np 2 python keras2_addons.py --horovod

For TensorFlow 2.15 with Keras 2.15 and tensorflow-addons 0.23. The optimizers of tensorflow-addons
go inside: `gc.CompressedOptimizer(MovingAverage(LAMB()))`.
"""

from __future__ import annotations

import click
import tensorflow as tf
import tensorflow_addons as tfa
from sklearn.datasets import load_digits

import tf_gradcomp as gc

keras = tf.keras


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


@click.command(context_settings={"show_default": True})
@click.option("--compressor", default="adacomp", metavar="adacomp|no_compression|...")
@click.option("--horovod", is_flag=True, help="Exchange gradients by Horovod.")
@click.option("--epochs", default=10)
@click.option("--batch-size", default=64, help="Rows of a batch over all workers.")
def main(compressor: str, horovod: bool, epochs: int, batch_size: int) -> None:
    """Train a small network on images of digits."""
    group, rank, size = None, 0, 1
    strategy = tf.distribute.get_strategy()
    if horovod:
        import horovod.tensorflow as hvd

        hvd.init()
        group, rank, size = "horovod", hvd.rank(), hvd.size()
    else:
        strategy = gc.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
    train = (
        tf.data.Dataset.from_tensor_slices((images[:1440], labels[:1440]))
        .shuffle(1440, seed=0)
        .batch(batch_size, drop_remainder=True)
    )
    if horovod:  # each rank takes its part of each batch
        train = train.map(lambda x, y: (x[rank::size], y[rank::size]))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA

    with strategy.scope():
        model = build_model()
        averaged = tfa.optimizers.MovingAverage(tfa.optimizers.LAMB(0.01), average_decay=0.9)
        model.compile(
            gc.CompressedOptimizer(averaged, compressor, group=group),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    is_chief = gc.is_chief(strategy)
    callbacks = [gc.callbacks.CompressionMonitor(), gc.callbacks.BroadcastInitialState()]
    model.fit(
        train.with_options(options),
        epochs=epochs,
        callbacks=callbacks,
        verbose=2 if is_chief else 0,
    )
    with strategy.scope():
        model.optimizer.assign_average_vars(model.trainable_variables)
    test = tf.data.Dataset.from_tensor_slices((images[1440:], labels[1440:])).batch(batch_size)
    _, accuracy = model.evaluate(test.with_options(options), verbose=0)
    if is_chief:
        print(f"Test accuracy of the mean weights {accuracy:.2%}")


if __name__ == "__main__":
    main()
