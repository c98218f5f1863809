"""A model with a custom `train_step`: an autoencoder that learns to remove noise.

    gradcomp run -n 2 train_step.py

The strategy runs `train_step` on each worker, with its part of the batch. The optimizer exchanges
the gradients. Gradients are summed over the workers, so a loss that the program computes itself
must be divided by the number of workers.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_gradcomp as gc


class Denoiser(keras.Model):
    """Learns to restore an image from a noisy copy."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise
        self.layer = keras.Sequential(
            [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(64)]
        )
        self.error = keras.metrics.Mean(name="error")

    def call(self, images: tf.Tensor) -> tf.Tensor:
        """The same shape: float32 [rows, 64]."""
        return self.layer(images)

    def train_step(self, images: tf.Tensor) -> dict[str, Any]:
        """One step of one worker, with its part of the batch."""
        workers = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.GradientTape() as tape:
            noisy = images + self.noise * tf.random.normal(tf.shape(images))
            error = tf.reduce_mean(tf.square(self(noisy) - images))
            loss = error / workers  # gradients are summed over the workers
            scaled = self.optimizer.scale_loss(loss)  # for mixed_float16; otherwise the loss itself
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        self.error.update_state(error)
        return {"error": self.error.result()}

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The metrics that `fit` resets before each epoch."""
        return [self.error]


def main() -> None:
    strategy = gc.MultiWorkerMirroredStrategy()  # (1) before any other use of TensorFlow
    keras.utils.set_random_seed(0)
    images = (load_digits().data / 16).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices(images).shuffle(len(images), seed=0).batch(64)

    with strategy.scope():  # (2) create the model and everything that belongs to it in here
        model = Denoiser(noise=0.3)
        model.build((None, 64))
        model.compile(gc.CompressedOptimizer(keras.optimizers.Adam(3e-3)))  # (3)
    model.fit(batches, epochs=5, verbose=2 if gc.is_chief(strategy) else 0)


if __name__ == "__main__":
    main()
