"""Loss scales: gradients are unscaled before anything else is done with them."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_gradcomp.distribute.gradients import divided


def unscaled(
    grads: Sequence[tf.Tensor | tf.IndexedSlices],
    scaler: keras.optimizers.LossScaleOptimizer | None,
    factor: float | None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Undoes loss scales: returns the gradients of the loss itself.

    Args:
        grads: Gradients of the scaled loss.
        scaler: The loss scaler by whose dynamic scale the loss was multiplied, if any.
        factor: The optimizer's static `loss_scale_factor`, if any.
    """
    if scaler is not None:
        grads = [divided(gradient, scaler.dynamic_scale.value) for gradient in grads]
    if factor is not None:
        grads = [divided(gradient, factor) for gradient in grads]
    return list(grads)


def update_loss_scale(scaler: keras.optimizers.LossScaleOptimizer, finite: tf.Tensor) -> None:
    """Keras' rule, by what all replicas saw: halve the scale, or double it after enough steps."""
    scale, counter = scaler.dynamic_scale, scaler.step_counter
    grows = tf.equal(counter.value, scaler.dynamic_growth_steps - 1)
    factor = tf.where(finite, tf.where(grows, 2.0, 1.0), 0.5)
    scale.assign(scale.value * factor)
    counts = tf.logical_and(finite, tf.logical_not(grows))
    counter.assign(tf.where(counts, counter.value + 1, 0))
