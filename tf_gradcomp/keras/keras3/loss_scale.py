"""Loss scales: gradients are unscaled before all other work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gradcomp.exchange.gradients import divided
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras.common.compressed import Compressed
from tf_gradcomp.keras.common.inner import in_loss_scaler
from tf_gradcomp.keras.common.wrappers import exchanging_in
from tf_gradcomp.strategy.strategy import CheckedStrategy


def unscaled(
    grads: Sequence[tf.Tensor | tf.IndexedSlices],
    scaler: keras.optimizers.LossScaleOptimizer | None,
    factor: float | None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Undoes a loss scaler's dynamic scale and an optimizer's static `loss_scale_factor`."""
    if scaler is not None:
        grads = [divided(gradient, scaler.dynamic_scale.value) for gradient in grads]
    if factor is not None:
        grads = [divided(gradient, factor) for gradient in grads]
    return list(grads)


def update_loss_scale(scaler: keras.optimizers.LossScaleOptimizer, finite: tf.Tensor) -> None:
    """Keras' rule for all replicas: halves the scale, or doubles it after enough steps."""
    scale, counter = scaler.dynamic_scale, scaler.step_counter
    grows = tf.equal(counter.value, scaler.dynamic_growth_steps - 1)
    factor = tf.where(finite, tf.where(grows, 2.0, 1.0), 0.5)
    scale.assign(scale.value * factor)
    counts = tf.logical_and(finite, tf.logical_not(grows))
    counter.assign(tf.where(counts, counter.value + 1, 0))


def check_no_scaler_inside(multi_optimizer: Any) -> None:
    """Refuses a wrapper around a loss scaler if nothing scales the loss for it."""
    for optimizer in getattr(multi_optimizer, "optimizers", ()):
        if isinstance(optimizer, Compressed) and in_loss_scaler(optimizer.inner_optimizer)[1:]:
            raise ValueError(
                "CompressedOptimizer: a MultiOptimizer does not multiply the loss by the scales of "
                "its optimizers, so it cannot contain a LossScaleOptimizer. Put a "
                "LossScaleOptimizer around the MultiOptimizer: "
                "LossScaleOptimizer(MultiOptimizer(...))."
            )


def finite_on_all(scaler: keras.optimizers.LossScaleOptimizer, finite: tf.Tensor) -> tf.Tensor:
    """Returns whether `finite` is true on all replicas, of a wrapper inside or of our strategy."""
    compressed = next(exchanging_in(scaler), None)
    if compressed is not None:
        exchange = compressed.exchange
        return _true_on_all(exchange.group.all_replicas, finite, f"{exchange.setup.label}_flag")
    context = tf.distribute.get_replica_context()
    if context is None or not isinstance(context.strategy, CheckedStrategy):
        return finite
    return _true_on_all(StrategyGroup(context.strategy), finite, "finite")


def _true_on_all(group: Group, flag: tf.Tensor, label: str) -> tf.Tensor:
    """Returns whether a bool scalar is true on all replicas; each replica calls it."""
    if group.size == 1:
        return flag
    false = tf.cast(tf.logical_not([flag]), tf.int32)
    return tf.equal(group.communicator(label).all_reduce(false)[0], 0)
