"""A model with a custom `train_step`: an autoencoder that learns to remove noise.

gradcomp run -n 2 train_step.py
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_gradcomp as gc


class Denoiser(keras.Model):
    """Restores an image, float32 [rows, 64], from a noisy copy."""

    def __init__(self):
        super().__init__()
        layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(64)]
        self.network = keras.Sequential(layers)
        self.error = keras.metrics.Mean(name="error")

    def call(self, images):
        return self.network(images)

    def train_step(self, images):  # runs on each worker, with its part of the batch
        workers = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.GradientTape() as tape:
            noisy = images + 0.3 * keras.random.normal(tf.shape(images))
            error = tf.reduce_mean(tf.square(self(noisy) - images))
            loss = error / workers  # gradients are summed over the workers
            scaled = self.optimizer.scale_loss(loss)  # for mixed_float16; otherwise the loss itself
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)  # exchanges the gradients
        self.error.update_state(error)
        return {"error": self.error.result()}


strategy = gc.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
images = (load_digits().data / 16).astype("float32")
batches = tf.data.Dataset.from_tensor_slices(images).shuffle(len(images), seed=0)
batches = batches.batch(64, drop_remainder=True)  # so that both workers have equal parts

with strategy.scope():
    model = Denoiser()
    model.build((None, 64))
    model.compile(gc.CompressedOptimizer(keras.optimizers.Adam(3e-3)))
model.fit(batches, epochs=5, verbose=2 if gc.is_chief(strategy) else 0)
