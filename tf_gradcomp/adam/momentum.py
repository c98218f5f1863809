"""The steps of Adam's family, for gradients that are already divided by the second moment's root.

Each step is its paper's step with 1 in place of the root: momentum, its bias correction, and
further operations on them. The optimizer itself applies learning rate and weight decay.

Entries that are delayed in a residual are sent as sums over their delay. This sum is already a
moving average; with additional momentum, the weights would follow even older gradients. A delayed
gradient therefore goes directly into the step and bypasses the momentum. The momentum then only
uses up the value that earlier steps left in it.

Sources: Kingma and Ba, "Adam", ICLR 2015, algorithm 1; Dozat, "Incorporating Nesterov Momentum into
Adam", 2016; You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf


class UpdateInputs(NamedTuple):
    """Inputs of an optimizer step, in the dtype of the variable."""

    variable: tf.Tensor  # the weights, any shape
    # The divided gradient that goes through the momentum, summed over the replicas; in the shape of
    # the weights.
    gradient: tf.Tensor
    # The divided gradient that bypasses the momentum, in the same form. Either `gradient` or
    # `direct` is zero.
    direct: tf.Tensor
    momentum: tf.Tensor  # the first moment, with `gradient` in it
    beta_1: float  # Adam's decay rate of the momentum
    step: tf.Tensor  # scalar, 1 in the first step
    correction: tf.Tensor  # of `momentum`, see `bias_correction`
    # Scalar, Nadam's product of all momentum coefficients, this step's included; None for other
    # optimizers.
    product: Any = None
    schedule: float = 1.0  # how fast Nadam's momentum coefficients grow; 1 in its paper


Step = Callable[[UpdateInputs], tf.Tensor]  # returns the update to subtract, without the rate


def split(gradient: tf.Tensor, delayed: tf.Tensor | bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Splits a gradient into a part that goes through the momentum and a part that bypasses it."""
    nothing = tf.zeros_like(gradient)
    return tf.where(delayed, nothing, gradient), tf.where(delayed, gradient, nothing)


def bias_correction(beta_1: Any, step: tf.Tensor) -> tf.Tensor:
    """Returns the number by which Adam divides the momentum in a step; in the dtype of `step`."""
    return 1 - tf.pow(tf.cast(beta_1, step.dtype), step)


def adam(inputs: UpdateInputs) -> tf.Tensor:
    """The step of Adam and of AdamW."""
    return inputs.momentum / inputs.correction + inputs.direct


def lamb(inputs: UpdateInputs) -> tf.Tensor:
    """The step of LAMB: Adam's, scaled to the length of the weights."""
    return to_length_of(inputs.variable, adam(inputs))


def to_length_of(variable: tf.Tensor, update: tf.Tensor) -> tf.Tensor:
    """An update scaled to the length of the weights; unscaled if either is zero."""
    weights, length = tf.norm(variable), tf.norm(update)
    is_nonzero = tf.logical_and(weights > 0, length > 0)
    return tf.where(is_nonzero, weights / tf.where(is_nonzero, length, 1), 1) * update


def nadam(inputs: UpdateInputs) -> tf.Tensor:
    """The step of Nadam: Adam's with Nesterov momentum."""
    this = _nadam_factor(inputs.beta_1, inputs.step, inputs.schedule)
    following = _nadam_factor(inputs.beta_1, inputs.step + 1, inputs.schedule)
    ahead = following * inputs.momentum / (1 - inputs.product * following)
    return ahead + (1 - this) * inputs.gradient / (1 - inputs.product) + inputs.direct


def nadam_product(beta_1: float, step: tf.Tensor) -> tf.Tensor:
    """Returns the product of Nadam's momentum coefficients from step 1 to `step`."""
    growing = tf.range(1.0, tf.minimum(step, 1000) + 1)  # after that, a coefficient is beta_1
    return tf.pow(beta_1, step) * tf.reduce_prod(_nadam_factor(1.0, growing, 1.0))


def _nadam_factor(beta_1: float, step: tf.Tensor, schedule: float) -> tf.Tensor:
    """Nadam's coefficient of the momentum in a step."""
    return beta_1 * (1 - 0.5 * tf.pow(tf.cast(0.96, step.dtype), schedule * step))
