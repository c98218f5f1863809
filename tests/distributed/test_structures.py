"""Models that Keras cannot build from a batch train under the strategy by their own steps."""

import functools
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import training
from tests.ranks import argument, report
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
TRIPLES = np.random.default_rng(0).normal(size=(3, 16, 5)).astype("float32")


def wrap(optimizer):
    return optimizer if REPLICAS == 1 else gc.CompressedOptimizer(optimizer, "no_compression")


def layers(inputs, *widths, built):
    first = [keras.Input((inputs,))] if built else []
    return keras.Sequential([*first, *(keras.layers.Dense(width, "tanh") for width in widths)])


class Siamese(keras.Model):
    """As on keras.io: a triple of pictures is its input, and no label is in the data."""

    def __init__(self, built):
        super().__init__()
        self.embedding = layers(5, 8, 3, built=built)
        self.total = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.total]

    def call(self, inputs):
        anchor, positive, negative = map(self.embedding, inputs)
        return tf.reduce_sum((anchor - positive) ** 2 - (anchor - negative) ** 2, -1)

    def loss_of(self, data):
        loss = tf.reduce_mean(tf.maximum(self(data) + 0.5, 0)) / REPLICAS
        self.total.update_state(loss * REPLICAS)
        return loss

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"loss": self.total.result()}

    def test_step(self, data):
        self.loss_of(data)
        return {"loss": self.total.result()}


class Adversaries(keras.Model):
    """A model without `call`, with two optimizers that nothing builds."""

    def __init__(self, built):
        super().__init__()
        self.generator = layers(3, 5, built=built)
        self.discriminator = layers(5, 8, 1, built=built)
        self.total = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.total]

    def compile(self, optimizer, other):
        super().compile(optimizer)
        self.other = other

    def train_step(self, data):
        entropy, rows = keras.losses.BinaryCrossentropy(from_logits=True), tf.shape(data)[0]
        true, false = tf.ones((rows, 1)), tf.zeros((rows, 1))
        with tf.GradientTape(persistent=True) as tape:
            created = self.discriminator(self.generator(data[:, :3]))
            loss = entropy(true, self.discriminator(data)) + entropy(false, created)
            generator_loss = entropy(true, created)
        for optimizer, part_loss, part in (
            (self.other, loss, self.discriminator),
            (self.optimizer, generator_loss, self.generator),
        ):
            variables = part.trainable_weights
            optimizer.apply(tape.gradient(part_loss, variables), variables)
        self.total.update_state(loss * REPLICAS)
        return {"loss": self.total.result()}


def trained(make, data, optimizers, evaluate_first=False):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        model.compile(*[wrap(keras.optimizers.Adam(0.01, epsilon=0.1)) for _ in range(optimizers)])
    batches = tf.data.Dataset.from_tensor_slices(data).batch(8, drop_remainder=True)
    before = [float(model.evaluate(batches, verbose=0))] if evaluate_first else []
    history = model.fit(batches, epochs=3, verbose=0)
    return [*before, *history.history["loss"]]


@functools.cache
def job(workers, way):
    return results(run_workers(PROGRAM, workers, [way]))


@pytest.mark.parametrize(
    "model",
    ["triple True", "triple False", "no call True", "no call False", "evaluated first"],
)
def test_workers_train_a_model_as_one_process(model):
    (plain,) = job(1, "plain")
    # Six steps of Adam(0.01, epsilon=0.1); sums are over 8 rows of a batch, and 5 and 8 inputs.
    bound = 10 * training(gain=0.1, terms=8 + 5 + 8, steps=6)
    for worker in job(2, "strategy"):
        np.testing.assert_allclose(worker[model], plain[model], rtol=0, atol=bound)
    assert abs(plain[model][-1] - plain[model][0]) > 4 * bound


if __name__ == "__main__":
    strategy = (
        tf.distribute.get_strategy() if argument(1) == "plain" else gc.MultiWorkerMirroredStrategy()
    )
    REPLICAS = strategy.num_replicas_in_sync
    seen = {}
    for built in (True, False):
        seen[f"triple {built}"] = trained(lambda: Siamese(built), tuple(TRIPLES), 1)  # noqa: B023
        seen[f"no call {built}"] = trained(lambda: Adversaries(built), TRIPLES[0], 2)  # noqa: B023
    seen["evaluated first"] = trained(lambda: Siamese(built=False), tuple(TRIPLES), 1, True)
    report(seen)
