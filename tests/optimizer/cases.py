"""Optimizers to wrap, and a compressed one on several replicas."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.replicas import copies, mirrored, stepper

OPTIMIZERS = [
    keras.optimizers.SGD(0.1),
    keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    keras.optimizers.Adam(0.01, amsgrad=True),
    keras.optimizers.AdamW(0.01, weight_decay=0.1),
    keras.optimizers.Adadelta(1.0),
    keras.optimizers.Adagrad(0.1),
    keras.optimizers.Adamax(0.01),
    keras.optimizers.Adafactor(0.05, epsilon_1=1e-10),
    keras.optimizers.Nadam(0.01),
    keras.optimizers.Ftrl(0.1),
    keras.optimizers.Lion(0.001),
    keras.optimizers.Lamb(0.01),
    *([keras.optimizers.Muon(0.01)] if hasattr(keras.optimizers, "Muon") else []),
]
FEATURES = [
    keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    keras.optimizers.Adam(0.01, clipnorm=0.5),
    keras.optimizers.Adam(0.01, global_clipnorm=0.5),
    keras.optimizers.Adam(0.01, clipvalue=0.1),
    keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10)),
    keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0),
]


def iterations(optimizer):
    return int(keras.ops.convert_to_numpy(optimizer.iterations))


def label(optimizer):
    settings = [
        name
        for name in ("use_ema", "gradient_accumulation_steps", "clipnorm", "global_clipnorm")
        if getattr(optimizer, name)
    ]
    return "-".join([type(optimizer).__name__, *settings])


every_optimizer = pytest.mark.parametrize("inner", OPTIMIZERS, ids=label)
every_feature = pytest.mark.parametrize("inner", FEATURES, ids=label)


def copy_of(optimizer):
    return type(optimizer).from_config(optimizer.get_config())


def new_variables():
    generator = np.random.default_rng(1)
    return [
        keras.Variable(generator.normal(size=(40, 30)).astype("float32"), name="kernel"),
        keras.Variable(np.zeros(30, "float32"), name="bias"),
    ]


def gradients_at(step, replicas=2, bad=None):
    """Returns `gradients[replica][variable]`; the gradient of replica `bad` is not finite."""
    generator = np.random.default_rng(100 + step)
    gradients = [
        [generator.normal(size=shape).astype("float32") for shape in ((40, 30), (30,))]
        for _ in range(replicas)
    ]
    if bad is not None:
        gradients[bad][0][3, 4] = np.nan
    return gradients


class Replicas:
    """A compressed optimizer with two variables under a `MirroredStrategy`."""

    def __init__(self, inner="sgd", strategy=None, *, graph=False, around=None, **kwargs):
        self.strategy = strategy or mirrored(2)
        with self.strategy.scope():
            self.variables = new_variables()
            if not isinstance(inner, str):
                inner = copy_of(inner)  # an optimizer is created in the scope
            self.optimizer = self.outer = gc.CompressedOptimizer(inner, **kwargs)
            if around is not None:
                self.outer = around(self.optimizer)
            self.outer.build(self.variables)
        self.step = stepper(
            self.strategy, lambda grads: self.outer.apply(grads, self.variables), graph=graph
        )

    def value(self, variable=0):
        return self.variables[variable].numpy()

    def residuals(self, variable=0):
        return copies(self.strategy, self.optimizer.exchange.residuals[variable])

    def assert_replicas_equal(self):
        for variable in [*self.variables, *self.optimizer.inner_optimizer.variables]:
            first, *others = copies(self.strategy, variable)
            for other in others:
                np.testing.assert_array_equal(first, other)
