"""Sums that are too large for their type."""

from __future__ import annotations

import tensorflow as tf


def unless_too_large(total: tf.Tensor, given_finite: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Replaces a sum by zeros if the sum is not finite although all its terms are finite.

    The method then continues as if it had sent the terms, and has the step skipped. Terms that
    return to the residuals would make the sums of all later steps too large as well. Returns the
    sum or zeros, and whether the sum fits.
    """
    finite = tf.reduce_all(tf.math.is_finite(total))
    too_large = tf.logical_and(given_finite, tf.logical_not(finite))
    kept = tf.cond(too_large, lambda: tf.zeros_like(total), lambda: tf.identity(total))
    return kept, tf.logical_not(too_large)
