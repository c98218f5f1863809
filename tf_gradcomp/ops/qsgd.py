"""QSGD with error feedback: the ops of one step.

Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017, https://arxiv.org/abs/1610.02132, in the form with a minimum and a unit per bucket of
CGX (https://arxiv.org/abs/2111.08617) and L-GreCo (https://arxiv.org/abs/2210.17357). The layout of
a payload is documented in docs/payload_format.md, and `tests.reference.qsgd` is the same in
NumPy.

With e the residual and g the gradient of a variable, in each bucket:

    p = e + g
    unit = (max p - min p) / (2^bits - 1)
    level = floor((p - min p) / unit + offset), at most 2^bits - 1
    sent: min p + unit * level
    e <- p - what was sent

The offset is 1/2 to round to the nearest, or random, uniform between 0 and 1: then what is sent is
p on average. Random numbers come from Philox, a counter-based generator, with (seed, replica) as
key and (element, tensor, step) as counter. All arithmetic is float32, in the order of the oracle,
without fused multiply-add. Results don't depend on the number of threads or on the processor.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp.ops import library
from tf_gradcomp.ops.handles import handles_of
from tf_gradcomp.ops.settings import Settings, tensor_of


def qsgd_encode(
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    step: tf.Tensor | int,
    *,
    replica: tf.Tensor | int,
    bits: Settings,
    bucket_size: int,
    stochastic: bool,
    seed: int,
    fingerprint: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Packs the gradients of one step into one payload, and keeps the rest in the residuals.

    If a residual plus gradient is not finite anywhere, the payload has the non-finite flag and
    zeros, the gradients are discarded and the residuals are untouched.

    Args:
        residuals: float32 variables or their resource handles, updated in place.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        step: int64 scalar, the same on all replicas.
        replica: Integer scalar, the replica's number: each draws numbers of its own.
        bits: One per tensor, 2 to 8, or 0 to send the tensor whole, as float32. They may change
            between steps; the header of the payload has a digest of them.
        bucket_size: Elements in a bucket, a multiple of 32 up to 65536.
        stochastic: Whether values are rounded at random; otherwise to the nearest level.
        seed: Signed 64-bit, of the random numbers.
        fingerprint: Signed 64-bit; payloads with another one are refused by the decoder.

    Returns:
        payload, int32 [words], as many for the same shapes and settings; and tensor_bytes, int64
        [number of tensors]: the bytes of the payload that each tensor takes, which with the header
        of 56 bytes are all of it.

    Raises:
        tf.errors.InvalidArgumentError: If shapes, types, bits or bucket size are wrong.
        tf.errors.FailedPreconditionError: If a residual is not initialized.
    """
    return library.load().qsgd_encode(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        step=tf.convert_to_tensor(step, tf.int64),
        replica=tf.cast(replica, tf.int64),
        bits=tensor_of(bits),
        bucket_size=bucket_size,
        stochastic=stochastic,
        seed=seed,
        fingerprint=fingerprint,
    )


def qsgd_decode(
    payloads: tf.Tensor,
    step: tf.Tensor | int,
    *,
    shapes: Sequence[tf.TensorShape | Sequence[int]],
    bits: Settings,
    bucket_size: int,
    fingerprint: int,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Adds up the payloads of all replicas.

    Args:
        payloads: int32 [replicas, words], a payload in each row.
        step: int64 scalar, the step that all of them must be of.
        shapes: The shapes of the tensors, fully known.
        bits: The same as for encoding.
        bucket_size: The same as for encoding.
        fingerprint: The same as for encoding.

    Returns:
        reduced, one float32 tensor per shape: the sum over the replicas, added in their order; and
        finite, bool scalar: whether no replica was flagged non-finite and no sum overflowed (if
        not, reduced are zeros).

    Raises:
        tf.errors.InvalidArgumentError: If a payload is broken, or of another program, step, plan or
            version. The message names the replica.
    """
    return library.load().qsgd_decode(
        payloads=payloads,
        step=tf.convert_to_tensor(step, tf.int64),
        N=len(shapes),
        shapes=list(shapes),
        bits=tensor_of(bits),
        bucket_size=bucket_size,
        fingerprint=fingerprint,
    )


def qsgd_put_back(
    residuals: Sequence[tf.Tensor | tf.Variable],
    payload: tf.Tensor,
    *,
    bits: Settings,
    bucket_size: int,
    fingerprint: int,
) -> tf.Operation | None:
    """Adds what a replica had packed back into its residuals, because the step is skipped.

    A payload with the non-finite flag puts nothing back.

    Args:
        residuals: float32 variables or their resource handles, updated in place.
        payload: int32 [words], the replica's own.
        bits: The same as for encoding.
        bucket_size: The same as for encoding.
        fingerprint: The same as for encoding.

    Returns:
        The operation in a graph, None in eager execution.

    Raises:
        tf.errors.InvalidArgumentError: If the payload is broken; the residuals are then untouched.
    """
    return library.load().qsgd_put_back(
        residuals=handles_of(residuals),
        payload=payload,
        bits=tensor_of(bits),
        bucket_size=bucket_size,
        fingerprint=fingerprint,
    )


def qsgd_errors(
    values: tf.Tensor, bits: Settings, *, bucket_size: int, stochastic: bool
) -> tf.Tensor:
    """The L2 norms of what rounding would take off a tensor, at several numbers of bits.

    Args:
        values: float32, finite, any shape.
        bits: 2 to 8 each, or 0 for none, which takes nothing off.
        bucket_size: As for encoding.
        stochastic: As for encoding. Then it is the root of the expected square.

    Returns:
        float64 [numbers of bits].

    Raises:
        tf.errors.InvalidArgumentError: If bits or bucket size are wrong.
    """
    return library.load().qsgd_errors(
        values=values, bits=tensor_of(bits), bucket_size=bucket_size, stochastic=stochastic
    )
