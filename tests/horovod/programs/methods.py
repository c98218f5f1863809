"""Trains by METHOD ... in an own loop; a gradient of the last rank is once not finite."""

import sys

import keras
import numpy as np
import tensorflow as tf
from common import strategy

import tf_gradcomp as gc
from tests.ranks import RANK, SIZE, compressed, digest, report, values
from tf_gradcomp import compressors
from tf_gradcomp.keras.callbacks.autoencoder_training import autoencoder_of

STEPS, BAD_STEP, PLANNED, ROWS = 30, 12, 18, 12
PAIRS = {  # an autoencoder that keeps the mean of two
    "encoder": [[1, 2, 2]],
    "decoder": [[1, 2, 2]],
    "slope": 1.0,
    "weights": [0.5, 0.5, 0, 1, 1, 0, 0.5, 0],
}
METHODS = {
    **{name: name for name in compressors.names()},
    "lgc": compressors.LGC(
        density=0.1, warmup_steps=10, training_steps=6, guard=0.9, autoencoder=PAIRS
    ),
    "lgreco": compressors.LGreCo("top_k"),
    "bfloat16": compressors.Cast("bfloat16"),
    "warmed up": compressors.ScaleCom(20, warmup_steps=BAD_STEP + 2),
}


def batches():
    """Other rows on each rank, and the targets of one linear model."""
    rng = np.random.default_rng(3)
    kernel = rng.normal(size=(40, 32))
    for step in range(STEPS):
        x = rng.normal(size=(SIZE * ROWS, 40)).astype("float32")
        y = (x @ kernel).astype("float32")
        if step == BAD_STEP:
            x[-1] = np.nan
        yield x, y


def train(method):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        variables = [keras.Variable("glorot_uniform", shape=(40, 32)), keras.Variable([0.0] * 32)]
        optimizer = compressed(keras.optimizers.SGD(0.05), METHODS[method], precondition=None)
        optimizer.build(variables)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ variables[0] + variables[1] - y))
            if optimizer.group.by_strategy:
                loss /= SIZE
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)

    step = tf.function(lambda x, y: strategy.run(replica_step, [x, y]), autograph=False)
    autoencoder = gc.callbacks.AutoencoderTraining()
    for index, (x, y) in enumerate(batches()):
        if index == PLANNED:
            optimizer.exchange.plan_settings()
        local = slice(RANK * ROWS, (RANK + 1) * ROWS)
        step(tf.constant(x[local]), tf.constant(y[local]))
        autoencoder.train(optimizer.exchange)
    own_residuals = digest(optimizer.group.local(r, 0) for r in optimizer.exchange.residuals)
    with optimizer.exchange.saving.saving_on_all():
        sums = {
            name: values(map(optimizer.exchange.saving.read, kept))
            for name, kept in optimizer.exchange.state.items()
        }
    traffic = optimizer.exchange.traffic()
    return {
        "weights": digest(variables),
        "values": values(variables),
        "sums": sums,
        "own residuals": own_residuals,
        "skipped": int(optimizer.exchange.skipped_steps.numpy()),
        "payload": traffic.payload_bytes,
        "sent": traffic.sent_bytes,
        "exchanges": traffic.exchanges,
        "phase": method == "lgc" and autoencoder_of(optimizer.exchange).stage,
        "plan": method == "lgreco" and optimizer.exchange.hooks.plan_in_force().settings,
    }


if __name__ == "__main__":
    report({method: train(method) for method in sys.argv[1:]})
