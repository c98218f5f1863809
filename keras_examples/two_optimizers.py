"""A GAN: two models with an optimizer each, and both optimizers compress.

gradcomp run -n 2 two_optimizers.py
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_gradcomp as gc

NOISE = 16


class GAN(keras.Model):
    """Trains the discriminator and the generator in each step."""

    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.of_generator = keras.metrics.Mean("generator_loss")
        self.of_discriminator = keras.metrics.Mean("discriminator_loss")

    def compile(self, generator_optimizer, discriminator_optimizer):
        super().compile(optimizer=generator_optimizer)
        self.discriminator_optimizer = discriminator_optimizer

    def train_step(self, real):
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)  # divides by the workers
        noise = keras.random.normal((tf.shape(real)[0], NOISE))  # each worker draws its own
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(noise, training=True)
            of_real = self.discriminator(real, training=True)
            of_fake = self.discriminator(fake, training=True)
            ones, zeros = tf.ones_like(of_real), tf.zeros_like(of_fake)
            discriminator_loss = entropy(ones, of_real) + entropy(zeros, of_fake)
            generator_loss = entropy(ones, of_fake)
        for optimizer, loss, model in (
            (self.discriminator_optimizer, discriminator_loss, self.discriminator),
            (self.optimizer, generator_loss, self.generator),
        ):  # in the same order on all workers
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        workers = tf.distribute.get_strategy().num_replicas_in_sync
        self.of_generator.update_state(generator_loss * workers)
        self.of_discriminator.update_state(discriminator_loss * workers)
        return {m.name: m.result() for m in (self.of_generator, self.of_discriminator)}


strategy = gc.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
images = (load_digits().data / 16).astype("float32")
batches = tf.data.Dataset.from_tensor_slices(images).shuffle(len(images), seed=0)
batches = batches.batch(64, drop_remainder=True)

with strategy.scope():
    dense = keras.layers.Dense
    generator = [keras.Input((NOISE,)), dense(128, "relu"), dense(64, "sigmoid")]
    discriminator = [keras.Input((64,)), dense(128, "relu"), dense(1)]
    model = GAN(keras.Sequential(generator), keras.Sequential(discriminator))
    model.compile(
        gc.CompressedOptimizer(keras.optimizers.Adam(1e-3, beta_1=0.5)),
        gc.CompressedOptimizer(keras.optimizers.Adam(1e-3, beta_1=0.5)),
    )
model.fit(batches, epochs=40, verbose=2 if gc.is_chief(strategy) else 0)
