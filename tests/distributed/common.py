"""Code that the worker programs of these tests share.

Helpers of programs that run on each worker, make several checks, and report the results. The tests
decide whether that is right: only they see all workers.
"""

from __future__ import annotations

import functools
import os

import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc
from tests.ranks import digest, inner_of

# Every variable whole and as float32 in the payload: training must equal that without compression.
WHOLE = gc.compressors.AdaComp(overrides={"": None})


@functools.cache
def _the_strategy(compressor):
    return gc.MultiWorkerMirroredStrategy(compressor=compressor)


class Setup:
    """A way to train: where gradients are exchanged, and by which compressor.

    `unwrapped`: by our strategy, without a compressor; `optimizer`: by `CompressedOptimizer`;
    `strategy`: by a compressor on the strategy; `alone`: there is nothing to bring together.

    A program can have one strategy, as TensorFlow cannot start its collectives twice: so `strategy`
    is the only way of its program.
    """

    def __init__(self, way, compressor="adacomp"):
        self.way = way
        self.compressor = compressor
        if way == "alone":
            self.strategy = tf.distribute.get_strategy()
        else:
            self.strategy = _the_strategy(compressor if way == "strategy" else None)

    def wrap(self, optimizer, **kwargs):
        if self.way == "optimizer":
            # Keeps both ways equal; programs about preconditioning request it explicitly.
            kwargs = {"precondition": None, **kwargs}
            return gc.CompressedOptimizer(optimizer, self.compressor, **kwargs)
        return optimizer

    def model(self, build, optimizer, seed=0, policy="float32", **compile_args):
        """A compiled model, the same in every process and at every call."""
        keras.backend.clear_session()
        keras.utils.set_random_seed(seed)
        compile_args = {"loss": classification_loss(), **compile_args}
        keras.mixed_precision.set_global_policy(policy)
        with self.strategy.scope():
            model = build()
            model.compile(optimizer=optimizer(), **compile_args)
        keras.mixed_precision.set_global_policy("float32")
        return model


def classification_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def digits(n=128, features=8, classes=3, seed=1):
    """Separable points: `(x, y)`, equal on all workers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, features)).astype("float32")
    y = np.argmax(x @ rng.normal(size=(features, classes)), axis=1).astype("int32")
    return x, y


def dense_model(features=8, classes=3):
    return keras.Sequential(
        [
            keras.layers.Input((features,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(classes, dtype="float32"),
        ]
    )


def linear_model(features=8, classes=3):
    """Returns a model of few variables, whose steps are traced in less time."""
    return keras.Sequential([keras.layers.Input((features,)), keras.layers.Dense(classes)])


def state_digest(model):
    """Returns digests of the weights, and of the optimizer's slots and counters."""
    return {
        "weights": digest(model.trainable_variables),
        "slots": digest(inner_of(model.optimizer).variables),
    }


def residual_sums(exchange):
    """Returns for each variable the sum of the job's residuals; a collective."""
    return [np.asarray(residual) for residual in exchange.residuals]


def state_sums(exchange):
    """Returns by name a method's state in a checkpoint, for each variable; a collective."""
    return {
        name: [np.asarray(variable) for variable in variables]
        for name, variables in exchange.state.items()
    }


def local_residuals(exchange):
    """For each variable, this worker's own residual."""
    return [
        residual.values[0].numpy() if hasattr(residual, "values") else np.asarray(residual)
        for residual in exchange.residuals
    ]


def scalar(variable):
    """The number in a variable, however many replicas have it."""
    return np.asarray(keras.ops.convert_to_numpy(variable)).item()


def report_arrays(arrays):
    """Hands arrays by name to the test."""
    np.savez(os.environ["RESULT_PATH"], **arrays)


def say(text):
    """Prints a line that the test waits for."""
    print(text, flush=True)
