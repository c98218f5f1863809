"""Variables trained on given gradients with local steps: what programs of these tests share."""

import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc
from tests.distributed.common import Setup, local_residuals, scalar
from tests.distributed.local_learners import RATE, SHAPES
from tests.ranks import RANK
from tf_gradcomp.keras.local.rounds import measures_of_rounds


def _as_tensors(gradient):
    """Returns a gradient, or slices, of arrays as one of tensors."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.constant(gradient)
    parts = (gradient.values, gradient.indices, gradient.dense_shape)
    return tf.IndexedSlices(*map(tf.constant, parts))


class Trained:
    """Variables of zeros with an optimizer, and steps on given gradients."""

    def __init__(
        self,
        compressor,
        local_steps,
        inner=lambda: keras.optimizers.SGD(RATE),
        scaler=None,
        dtypes=("float32", "float32"),
    ):
        strategy = Setup("optimizer").strategy
        with strategy.scope():
            rounds = local_steps()
            self.variables = [
                keras.Variable(np.zeros(shape), dtype=dtype, aggregation="mean", name=f"v{i}")
                for i, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=True))
            ]
            self.optimizer = gc.CompressedOptimizer(inner(), compressor, local_steps=rounds)
            self.optimizer.build(self.variables)
            self.applies = scaler(self.optimizer) if scaler else self.optimizer
            self.applies.build(self.variables)

        @tf.function(autograph=False)
        def take(steps):
            for grads in steps:
                scale = self.applies.scale_loss(tf.constant(1.0))
                variables = self.variables[: len(grads)]
                local = [
                    tf.cast(tf.math.scalar_mul(scale, gradient), variable.dtype)
                    for gradient, variable in zip(grads, variables, strict=True)
                ]
                strategy.run(self.applies.apply, (local, variables))

        self.take = take

    def on(self, steps, in_one_graph=False):
        """Takes a step on each list of gradients."""
        own = [list(map(_as_tensors, step_gradients[RANK])) for step_gradients in steps]
        for steps_of_graph in [own] if in_one_graph else [[step] for step in own]:
            self.take(steps_of_graph)
        return self

    def checkpoint(self):
        values = [variable.value for variable in self.variables]
        return tf.train.Checkpoint(optimizer=self.optimizer, variables=values)

    def seen(self):
        return {
            "values": [np.float32(variable.numpy()) for variable in self.variables],
            "residuals": local_residuals(self.optimizer.exchange),
            "iterations": scalar(self.optimizer.iterations),
            "exchanges": self.optimizer.exchange.exchanges,
            "skipped": scalar(self.optimizer.exchange.skipped_steps),
            **measures_of_rounds(self.optimizer),
        }
