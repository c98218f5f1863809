"""An equality check without a side effect."""

from __future__ import annotations

import tensorflow as tf

from tf_gradcomp.ops import library


def pass_if_equal(
    value: tf.Tensor, actual: tf.Tensor, expected: tf.Tensor, message: str
) -> tf.Tensor:
    """Returns `value`, unless `actual` and `expected` differ.

    `tf.debugging.assert_equal` has a side effect, so TensorFlow runs all such checks of a graph in
    sequence. With several replicas in one process, the check of one replica would wait for the
    check of another, which waits for a collective that both must have begun.

    Args:
        value: Of any shape and dtype.
        actual: float32.
        expected: float32, in the same shape.
        message: The message of the error.

    Raises:
        tf.errors.InvalidArgumentError: If they differ, or one has a NaN; only where the returned
            tensor is used.
    """
    return library.load().pass_if_equal(
        value=value, actual=actual, expected=expected, message=message
    )
