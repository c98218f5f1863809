"""Adds residuals to gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from tf_gradcomp.exchange.gradients import plus_residual

Gradients: TypeAlias = Sequence[tf.Tensor | tf.IndexedSlices]


def add_residuals(
    gradients: Gradients,
    residuals: Sequence[tf.Tensor],
    wanted: tf.Tensor,
    scale: tf.Tensor | float,
    replicas: int,
) -> tuple[list[tf.Tensor | tf.IndexedSlices], list[tf.Tensor]]:
    """Adds to gradients as much of their residuals as the gradients' dtypes can hold.

    The residuals divided by `scale` are in units of the gradients. Returns the sums, and what stays
    in the residuals; nothing is added unless `wanted`.
    """

    def added() -> tuple[list[tf.Tensor | tf.IndexedSlices], list[tf.Tensor]]:
        pairs = [
            plus_residual(gradient, residual / scale, replicas)
            for gradient, residual in zip(gradients, residuals, strict=True)
        ]
        return [total for total, _ in pairs], [left * scale for _, left in pairs]

    return tf.cond(wanted, added, lambda: (list(gradients), list(residuals)))
