"""SignSGD with error feedback: the ops of one step.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019, https://arxiv.org/abs/1901.09847, Algorithm 1. The layout of a payload is documented in
docs/payload_format.md, and `tests.reference.sign_sgd` is the same in NumPy.

With e the residual and g the gradient of a variable:

    p = e + g
    mean = the mean of |p| over the variable
    sent: sign(p) * mean, where 0 and -0 count as positive
    e <- p - what was sent

All arithmetic is float32, in this order, without fused multiply-add; only the mean is summed in
float64, in an order that depends on nothing but the variable's size.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp.ops import library
from tf_gradcomp.ops.handles import handles_of


def sign_sgd_encode(
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    step: tf.Tensor | int,
    *,
    fingerprint: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Packs the gradients of one step into one payload, and keeps the rest in the residuals.

    If a residual plus gradient is not finite anywhere, the payload has the non-finite flag and
    zeros, the gradients are discarded and the residuals are untouched.

    Args:
        residuals: float32 variables or their resource handles, updated in place.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        step: int64 scalar, the same on all replicas.
        fingerprint: Signed 64-bit; payloads with another one are refused by the decoder.

    Returns:
        payload, int32 [words], as many for the same shapes; and tensor_bytes, int64 [number of
        tensors]: the bytes of the payload that each tensor takes, which with the header of 56 bytes
        are all of it.

    Raises:
        tf.errors.InvalidArgumentError: If shapes or types are wrong.
        tf.errors.FailedPreconditionError: If a residual is not initialized.
    """
    return library.load().sign_sgd_encode(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        step=tf.convert_to_tensor(step, tf.int64),
        fingerprint=fingerprint,
    )


def sign_sgd_decode(
    payloads: tf.Tensor,
    step: tf.Tensor | int,
    *,
    shapes: Sequence[tf.TensorShape | Sequence[int]],
    fingerprint: int,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Adds up the payloads of all replicas.

    Args:
        payloads: int32 [replicas, words], a payload in each row.
        step: int64 scalar, the step that all of them must be of.
        shapes: The shapes of the tensors, fully known.
        fingerprint: The same as for encoding.

    Returns:
        reduced, one float32 tensor per shape: the sum over the replicas, added in their order; and
        finite, bool scalar: whether no replica was flagged non-finite and no sum overflowed (if
        not, reduced are zeros).

    Raises:
        tf.errors.InvalidArgumentError: If a payload is broken, or of another program, step or
            version. The message names the replica.
    """
    return library.load().sign_sgd_decode(
        payloads=payloads,
        step=tf.convert_to_tensor(step, tf.int64),
        N=len(shapes),
        shapes=list(shapes),
        fingerprint=fingerprint,
    )


def sign_sgd_put_back(
    residuals: Sequence[tf.Tensor | tf.Variable], payload: tf.Tensor, *, fingerprint: int
) -> tf.Operation | None:
    """Adds what a replica had packed back into its residuals, because the step is skipped.

    A payload with the non-finite flag puts nothing back.

    Args:
        residuals: float32 variables or their resource handles, updated in place.
        payload: int32 [words], the replica's own.
        fingerprint: The same as for encoding.

    Returns:
        The operation in a graph, None in eager execution.

    Raises:
        tf.errors.InvalidArgumentError: If the payload is broken; the residuals are then untouched.
    """
    return library.load().sign_sgd_put_back(
        residuals=handles_of(residuals), payload=payload, fingerprint=fingerprint
    )
