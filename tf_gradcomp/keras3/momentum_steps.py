"""The updates of Keras' Adam family by gradients that are divided by the second moment already.

Each does what the class's `update_step` does, with 1 in place of the second moment's root.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tf_gradcomp.keras3 import keras_private

Step = Callable[[keras.optimizers.Optimizer, Any, keras.Variable, Any], None]


def _adam(
    optimizer: keras.optimizers.Optimizer, gradient: Any, variable: keras.Variable, rate: Any
) -> None:
    momentum = _updated_momentum(optimizer, gradient, variable)
    optimizer.assign_sub(variable, rate * momentum / _bias_correction(optimizer, variable))


def _lamb(
    optimizer: keras.optimizers.Optimizer, gradient: Any, variable: keras.Variable, rate: Any
) -> None:
    momentum = _updated_momentum(optimizer, gradient, variable)
    update = momentum / _bias_correction(optimizer, variable)
    weights, length = ops.norm(variable), ops.norm(update)
    both = ops.logical_and(weights > 0, length > 0)
    trust = ops.where(both, weights / ops.where(both, length, 1.0), 1.0)
    optimizer.assign_sub(variable, trust * rate * update)


def _nadam(
    optimizer: keras.optimizers.Optimizer, gradient: Any, variable: keras.Variable, rate: Any
) -> None:
    step = ops.cast(optimizer.iterations + 1, variable.dtype)
    this = optimizer.beta_1 * (1.0 - 0.5 * ops.power(0.96, step))
    following = optimizer.beta_1 * (1.0 - 0.5 * ops.power(0.96, step + 1))
    product = ops.cast(keras_private.nadam_product(optimizer), variable.dtype)
    momentum = _updated_momentum(optimizer, gradient, variable)
    ahead = following * momentum / (1 - product * following)
    optimizer.assign_sub(variable, rate * (ahead + (1 - this) * gradient / (1 - product)))


MOMENTUM_STEPS: dict[type, Step] = {
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.Nadam: _nadam,
    keras.optimizers.Lamb: _lamb,
}


def _updated_momentum(
    optimizer: keras.optimizers.Optimizer, gradient: Any, variable: keras.Variable
) -> keras.Variable:
    (momentum,) = keras_private.slots(optimizer, "momentums", [variable])
    optimizer.assign_add(momentum, (gradient - momentum) * (1 - optimizer.beta_1))
    return momentum


def _bias_correction(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> Any:
    step = ops.cast(optimizer.iterations + 1, variable.dtype)
    return 1 - ops.power(ops.cast(optimizer.beta_1, variable.dtype), step)


@contextlib.contextmanager
def momentum_only(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Within it, an optimizer of the Adam family takes gradients as divided, and as clipped.

    What is sparse even so was neither: the policy left it out of the exchange.
    """
    step = next(MOMENTUM_STEPS[c] for c in type(optimizer).__mro__ if c in MOMENTUM_STEPS)
    whole = type(optimizer).update_step

    def update_step(self: Any, gradient: Any, variable: keras.Variable, rate: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            whole(self, gradient, variable, rate)
        else:
            dtype = variable.dtype
            step(self, ops.cast(gradient, dtype), variable, ops.cast(rate, dtype))

    with keras_private.behaving_as(
        optimizer, update_step=update_step, _clip_gradients=lambda self, gradients: gradients
    ):
        yield
