"""Ops that quantize values: QSGD and signs.

QSGD with error feedback: the ops of one step.

Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017, https://arxiv.org/abs/1610.02132, in the form with a minimum and a unit per bucket of
CGX (https://arxiv.org/abs/2111.08617) and L-GreCo (https://arxiv.org/abs/2210.17357).
`tests.reference.qsgd` computes the same in NumPy.

With e the residual and g the gradient of a variable, in each bucket:

    p = e + g
    unit = (max p - min p) / (2^bits - 1)
    level = floor((p - min p) / unit + offset), at most 2^bits - 1
    sent: min p + unit * level
    e <- p - sent

The offset is 1/2 to round to the nearest level. A random offset, uniform between 0 and 1, makes the
sent value equal p on average. Random numbers come from Philox, a counter-based generator, with
(seed, replica) as key and (element, tensor, step) as counter. All arithmetic is float32, in the
order of the reference, without fused multiply-add.

SignSGD with error feedback: the ops of one step.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019, https://arxiv.org/abs/1901.09847, Algorithm 1. `tests.reference.sign_sgd` computes the
same in NumPy.

With e the residual and g the gradient of a variable:

    p = e + g
    mean = the mean of |p| over the variable
    sent: sign(p) * mean, where 0 and -0 count as positive
    e <- p - sent

All arithmetic is float32, in this order, without fused multiply-add. Only the mean is summed in
float64, in an order that depends on the variable's size alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp.ops import library, payload
from tf_gradcomp.ops.payload import Settings, handles_of, tensor_of


def qsgd_encode(
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    step: tf.Tensor | int,
    *,
    replica: tf.Tensor | int,
    bits: Settings,
    bucket_size: int,
    fingerprint: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Packs gradients as levels in buckets.

    The payload's length depends on the shapes and settings alone.

    Args:
        residuals: float32 variables or their resource handles, updated in place.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        step: int64 scalar, the same on all replicas.
        replica: Integer scalar, the replica's index: each replica draws its own random numbers.
        bits: One per tensor, 2 to 8, or 0 to send the tensor whole, as float32. Bits may change
            between steps; the payload's header has a digest of them.
        bucket_size: Elements in a bucket, a multiple of 32 up to 65536.
        fingerprint: Signed 64-bit; the decoder refuses payloads with another fingerprint.

    Returns:
        payload, int32 [length]; and tensor_bytes, int64 [tensors], the bytes that each tensor takes
        of the payload. The header takes the other 56 bytes.
    """
    return library.load().qsgd_encode(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        step=tf.convert_to_tensor(step, tf.int64),
        replica=tf.cast(replica, tf.int64),
        bits=tensor_of(bits),
        bucket_size=bucket_size,
        fingerprint=fingerprint,
    )


qsgd_decode = functools.partial(payload.decode, "qsgd")
qsgd_put_back = functools.partial(payload.put_back, "qsgd")


def qsgd_errors(values: tf.Tensor, bits: Settings, *, bucket_size: int) -> tf.Tensor:
    """Computes expected L2 norms of a tensor's rounding errors at several numbers of bits.

    A norm is the root of its expected square.

    Args:
        values: float32, finite, any shape.
        bits: 2 to 8 each, or 0 to send the tensor whole, without an error.
        bucket_size: As for encoding.

    Returns:
        float64 [numbers of bits].
    """
    return library.load().qsgd_errors(values=values, bits=tensor_of(bits), bucket_size=bucket_size)


def sign_sgd_encode(
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    step: tf.Tensor | int,
    *,
    fingerprint: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Packs gradients as signs and one mean per tensor.

    The payload's length depends on the shapes alone.

    Args:
        residuals: float32 variables or their resource handles, updated in place.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        step: int64 scalar, the same on all replicas.
        fingerprint: Signed 64-bit; the decoder refuses payloads with another fingerprint.

    Returns:
        payload, int32 [length]; and tensor_bytes, int64 [tensors], the bytes that each tensor takes
        of the payload. The header takes the other 56 bytes.
    """
    return library.load().sign_sgd_encode(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        step=tf.convert_to_tensor(step, tf.int64),
        fingerprint=fingerprint,
    )


sign_sgd_decode = functools.partial(payload.decode, "sign_sgd")
sign_sgd_put_back = functools.partial(payload.put_back, "sign_sgd")
