"""What becomes of sums that are too large for their type."""

from __future__ import annotations

import tensorflow as tf


def unless_too_large(total: tf.Tensor, given_finite: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Zeros in place of a sum that is not finite, though all that was added up is.

    A method then goes on as if it had sent what made up the sum, and has the step skipped: put
    back into the residuals, it would make the sums of all later steps too large as well.

    Args:
        total: The sum.
        given_finite: bool scalar, equal on all replicas: whether all of them were finite.

    Returns:
        The sum, or zeros; and whether it fits: false where zeros took its place.
    """
    finite = tf.reduce_all(tf.math.is_finite(total))
    too_large = tf.logical_and(given_finite, tf.logical_not(finite))
    kept = tf.cond(too_large, lambda: tf.zeros_like(total), lambda: tf.identity(total))
    return kept, tf.logical_not(too_large)
