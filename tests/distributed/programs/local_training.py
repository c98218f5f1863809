"""Variables trained on given gradients with local steps: what programs of these tests share."""

import keras
import numpy as np
import tensorflow as tf
from common import Setup, local_residuals, scalar

import tf_gradcomp as gc
from tests.ranks import RANK, SIZE
from tf_gradcomp.keras.local.rounds import measures_of_rounds

SHAPES = [(40, 8), (8,)]
RATE = 2.0**-5  # sums of small integers times this are exact in float32
strategy = Setup("optimizer").strategy


def gradients(steps, seed=3):
    """Small integers: [step][worker][variable]."""
    rng = np.random.default_rng(seed)
    return [
        [[rng.integers(-8, 9, shape).astype("float32") for shape in SHAPES] for _ in range(SIZE)]
        for _ in range(steps)
    ]


def _first_local_step(change):
    """Returns eight steps; the third, the first after a warm-up of two steps, is changed."""
    steps = gradients(8)
    change(steps[2])
    return steps


def _without_the_second_variable(worker_gradients):
    for gradients in worker_gradients:
        del gradients[1]


def _with_a_nan_on_worker_1(worker_gradients):
    worker_gradients[1][0][0, 0] = np.nan


WARM_UPS = {
    "whole": gradients(8),
    "not finite": _first_local_step(_with_a_nan_on_worker_1),
    "missing": _first_local_step(_without_the_second_variable),
}


class Trained:
    """Variables of zeros with an optimizer, and steps on given gradients."""

    def __init__(
        self, compressor, local_steps, inner=lambda: keras.optimizers.SGD(RATE), scaler=None
    ):
        with strategy.scope():
            rounds = local_steps()
            self.variables = [
                keras.Variable(np.zeros(shape, "float32"), aggregation="mean", name=f"v{i}")
                for i, shape in enumerate(SHAPES)
            ]
            self.optimizer = gc.CompressedOptimizer(inner(), compressor, local_steps=rounds)
            self.optimizer.build(self.variables)
            self.applies = scaler(self.optimizer) if scaler else self.optimizer
            self.applies.build(self.variables)

        @tf.function(autograph=False)
        def step(grads):
            scale = self.applies.scale_loss(tf.constant(1.0))
            local = [scale * gradient for gradient in grads]
            strategy.run(lambda: self.applies.apply(local, self.variables[: len(local)]))

        self.step = step

    def on(self, steps):
        """Takes a step on each list of gradients."""
        for step_gradients in steps:
            self.step([tf.constant(gradient) for gradient in step_gradients[RANK]])
        return self

    def checkpoint(self):
        values = [variable.value for variable in self.variables]
        return tf.train.Checkpoint(optimizer=self.optimizer, variables=values)

    def seen(self):
        return {
            "values": [variable.numpy() for variable in self.variables],
            "residuals": local_residuals(self.optimizer.exchange),
            "iterations": scalar(self.optimizer.iterations),
            "exchanges": self.optimizer.exchange.exchanges,
            "skipped": scalar(self.optimizer.exchange.skipped_steps),
            **measures_of_rounds(self.optimizer),
        }
