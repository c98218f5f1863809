"""A custom training loop, on one worker or on many, with compressed gradients.

    python custom_training_loop.py
    gradcomp run -n 2 custom_training_loop.py --compressor adacomp

`gc.CompressedOptimizer` exchanges the gradients in `apply`, so the loop is like any loop under
`tf.distribute`: each worker computes the gradients of its part of the batch, with the loss divided
by the size of the whole batch, because gradients are summed over the workers.
"""

from __future__ import annotations

from typing import Any

import click
import common
import keras
import tensorflow as tf

import tf_gradcomp as gc

LEARNING_RATES = {"adam": 1e-3, "sgd": 0.05}


def build_model(image_shape: tuple[int, ...], classes: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(classes),
        ]
    )


def make_optimizer(name: str, learning_rate: float | None) -> keras.optimizers.Optimizer:
    learning_rate = learning_rate or LEARNING_RATES[name]
    if name == "adam":
        return keras.optimizers.Adam(learning_rate)
    return keras.optimizers.SGD(learning_rate, momentum=0.9)


class Trainer:
    """A model, its optimizer, and one step of training and of testing on all workers."""

    def __init__(
        self,
        strategy: gc.MultiWorkerMirroredStrategy,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        batch_size: int,
    ) -> None:
        self.strategy = strategy
        self.model = model
        self.optimizer = optimizer
        self.batch_size = batch_size
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def train_step(self, batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """Trains on a batch; returns the loss."""
        losses = self.strategy.run(self._train_replica, args=(batch,))
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def _train_replica(self, batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        images, labels = batch
        with tf.GradientTape() as tape:
            logits = self.model(images, training=True)
            # Divides by the global batch size, not this worker's share, because gradients and
            # losses are summed.
            loss = tf.reduce_sum(self.loss(labels, logits)) / self.batch_size
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function
    def test_step(self, batch: tuple[tf.Tensor, tf.Tensor]) -> None:
        """Adds a batch to `accuracy`."""
        self.strategy.run(self._test_replica, args=(batch,))

    def _test_replica(self, batch: tuple[tf.Tensor, tf.Tensor]) -> None:
        images, labels = batch
        self.accuracy.update_state(labels, self.model(images, training=False))


def train(
    *,
    compressor: str,
    epochs: int,
    batch_size: int,
    optimizer: str,
    learning_rate: float | None,
    seed: int,
    dataset: str,
    history: str | None,
) -> None:
    """Trains on this worker, and reports if it is the chief."""
    strategy = gc.MultiWorkerMirroredStrategy()  # (1) before any other use of TensorFlow
    is_chief = gc.is_chief(strategy)
    # All workers shuffle in the same order, and each takes its own part of every batch.
    keras.utils.set_random_seed(seed)
    (train_x, train_y), test = common.load_images(dataset, seed)
    train = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((train_x, train_y))
        .shuffle(len(train_x), seed=seed)
        .batch(batch_size, drop_remainder=True)
    )
    validation = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(test).batch(batch_size)
    )

    with strategy.scope():  # (2) create the model and everything that belongs to it in here
        model = build_model(train_x.shape[1:], classes=int(train_y.max()) + 1)
        wrapped = gc.CompressedOptimizer(  # (3) around your optimizer
            make_optimizer(optimizer, learning_rate), compressor
        )
        # Otherwise the first step creates its variables, which takes a second trace.
        wrapped.build(model.trainable_variables)
        trainer = Trainer(strategy, model, wrapped, batch_size)

    measured: dict[str, list[float]] = {"loss": [], "val_accuracy": []}
    autoencoder = gc.callbacks.AutoencoderTraining()  # for --compressor lgc
    for epoch in range(1, epochs + 1):
        losses = []
        for batch in train:
            losses.append(trainer.train_step(batch))
            autoencoder.train(wrapped.exchange)
        wrapped.exchange.plan_settings()  # for --compressor lgreco, on all workers alike
        trainer.accuracy.reset_state()
        for batch in validation:
            trainer.test_step(batch)
        measured["loss"].append(float(tf.reduce_mean(losses)))
        measured["val_accuracy"].append(float(trainer.accuracy.result()))
        if is_chief:
            loss, accuracy = (values[-1] for values in measured.values())
            print(f"Epoch {epoch}: loss {loss:.4f}, test accuracy {accuracy:.2%}")

    if is_chief:
        if strategy.num_replicas_in_sync > 1:
            traffic = wrapped.exchange.traffic()
            payload, dense = traffic.payload_bytes, traffic.dense_bytes
            print(f"Payload of a step: {payload / traffic.exchanges:,.0f} bytes")
            print(f"Payload ratio: {dense / payload:.0f}")
        common.write_history(history, measured, wrapped)


@click.command(context_settings={"show_default": True})
@common.compressor_option
@click.option("--epochs", default=30)
@click.option("--batch-size", default=64, help="Rows of a batch over all workers.")
@click.option("--optimizer", type=click.Choice(list(LEARNING_RATES)), default="adam")
@click.option("--learning-rate", type=float, help="By default 0.001 for Adam, 0.05 for SGD.")
@click.option(
    "--seed", default=0, help="Seed of the split, the weights and the order of the images."
)
@click.option("--dataset", type=click.Choice(common.IMAGES), default="digits")
@common.history_option
def main(**settings: Any) -> None:
    """Train a convolutional network on images, in a custom training loop."""
    train(**settings)


if __name__ == "__main__":
    main()
