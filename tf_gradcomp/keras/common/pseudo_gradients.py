"""The arithmetic of a round: pseudo-gradients and residuals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.gradients import all_finite, divided, values_or_fill
from tf_gradcomp.keras.common.local_steps import LocalSteps


def local_share(
    start: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], replicas: int
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns a replica's share of the mean pseudo-gradient, and whether its round counts.

    Args:
        start: The common weights at the start of the round.
        weights: The replica's own weights now.
        replicas: The number of replicas.

    Returns:
        The differences, divided by the number of replicas, or zeros if a weight is not finite; and
        a bool scalar, whether all weights are finite.
    """
    moved = [before - now for before, now in zip(start, weights, strict=True)]
    counts = all_finite(moved)
    shares = [tf.where(counts, divided(one, replicas), tf.zeros_like(one)) for one in moved]
    return shares, counts


def has_gradients_left(
    exchange: GradientExchange, local_replica: int, of_weights: tf.Tensor
) -> tf.Tensor:
    """Returns whether synchronous steps have left state that rounds cannot use."""
    facts = (exchange.facts.residual_waits, exchange.facts.moments_taken)
    kept = tf.concat([exchange.group.local(fact, local_replica) for fact in facts], 0)
    return tf.logical_and(tf.logical_not(of_weights), tf.reduce_any(kept))


def gradients_for_residuals(
    grads: Sequence[Any], variables: Sequence[Any], every: Sequence[Any], finite: tf.Tensor
) -> list[Any]:
    """Returns a gradient for each variable, so that the residuals of all variables can be added.

    Args:
        grads: The gradients of some variables.
        variables: The variables of `grads`.
        every: All variables.
        finite: Whether the gradients are finite; otherwise they are replaced by zeros.

    Returns:
        The gradients of `every`; zeros for a variable without a gradient.
    """
    zeros = [tf.zeros(variable.shape, variable.dtype) for variable in every]
    given = dict(zip(map(id, variables), values_or_fill(finite, grads, 0.0), strict=True))
    return [given.get(id(v), zero) for v, zero in zip(every, zeros, strict=True)]


def finite_or_zero(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with zeros in place of non-finite values; integers stay unchanged."""
    if not value.dtype.is_floating:
        return value
    return tf.where(tf.math.is_finite(value), value, tf.zeros_like(value))


def decay(residuals: Iterable[tf.Variable], settings: LocalSteps) -> None:
    """Multiplies residuals by the settings' decay, before the exchange of a round adds to them."""
    if settings.residual_decay < 1:
        for residual in residuals:
            residual.assign(residual.read_value() * settings.residual_decay)


def drift(start: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the distance of weights from the start weights, relative to the start's norm."""
    before = [tf.cast(one, tf.float32) for one in start]
    now = [tf.cast(one, tf.float32) for one in weights]
    moved = [one - other for one, other in zip(before, now, strict=True)]
    return tf.math.divide_no_nan(tf.linalg.global_norm(moved), tf.linalg.global_norm(before))
