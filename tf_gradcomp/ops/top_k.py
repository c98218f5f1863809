"""TopK: the ops of one step.

The layout of a payload is documented in docs/payload_format.md, and
`tests.reference.top_k` is the same in NumPy. Results don't depend on the number of threads
or on the processor.

Source of the momentum correction: Lin et al., "Deep Gradient Compression: Reducing the
Communication Bandwidth for Distributed Training", ICLR 2018, https://arxiv.org/abs/1712.01887.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp.ops import library
from tf_gradcomp.ops.handles import handles_of
from tf_gradcomp.ops.settings import Settings, tensor_of


def momentum_correction(
    velocities: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor],
    *,
    momentum: float,
    clip_norm: float = math.inf,
) -> list[tf.Tensor]:
    """Clips the gradients of a replica and adds them to what is left of its velocities.

    All arithmetic is float32, without fused multiply-add; the norm is summed in float64, in a fixed
    order.

    Args:
        velocities: float32, one per gradient and of its shape; or none at all.
        gradients: float32, float16 or bfloat16, any shapes.
        momentum: How much of the velocities stays.
        clip_norm: The gradients are scaled down to this norm if that of all of them together is
            above it.

    Returns:
        For each gradient g with velocity u: momentum u + scale g, float32 (paper, section 3.2); or
        scale g without velocities. Not finite where g is not.

    Raises:
        tf.errors.InvalidArgumentError: If shapes or numbers of tensors differ.
    """
    return library.load().momentum_correction(
        velocities=list(velocities),
        gradients=list(gradients),
        N=len(gradients),
        momentum=momentum,
        clip_norm=clip_norm,
    )


def top_k_encode(
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    step: tf.Tensor | int,
    *,
    entries: Settings,
    fingerprint: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Packs the largest entries of residuals plus gradients into one payload, and keeps the rest.

    Of entries with equal magnitudes, the first ones are sent. If a residual plus gradient is not
    finite anywhere, the payload is as long, with the non-finite flag and zeros, and the residuals
    are as before.

    Args:
        residuals: float32 variables or their resource handles, updated in place.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        step: int64 scalar, the same on all replicas.
        entries: One per tensor: how many of its entries are sent, at most all; or 0 to send the
            tensor whole, without indices. They may change between steps; the header of the payload
            has a digest of them.
        fingerprint: Signed 64-bit; payloads with another one are refused by the decoder.

    Returns:
        payload, int32 [14 + words of all tensors], where a tensor takes 2 words for each entry, or
        one for each element if it is sent whole; and tensor_bytes, int64 [number of tensors].

    Raises:
        tf.errors.InvalidArgumentError: If shapes, types or numbers of entries are wrong.
        tf.errors.FailedPreconditionError: If a residual is not initialized.
    """
    return library.load().top_k_encode(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        step=tf.convert_to_tensor(step, tf.int64),
        entries=tensor_of(entries),
        fingerprint=fingerprint,
    )


def top_k_decode(
    payloads: tf.Tensor,
    step: tf.Tensor | int,
    *,
    shapes: Sequence[tf.TensorShape | Sequence[int]],
    entries: Settings,
    fingerprint: int,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Adds up the payloads of all replicas.

    Args:
        payloads: int32 [replicas, words], a payload in each row.
        step: int64 scalar, the step that all of them must be of.
        shapes: The shapes of the tensors, fully known.
        entries: The same as for encoding.
        fingerprint: The same as for encoding.

    Returns:
        reduced, one float32 tensor per shape: the sum over the replicas, added in their order; and
        finite, bool scalar: whether no replica was flagged non-finite and no sum overflowed (if
        not, reduced are zeros).

    Raises:
        tf.errors.InvalidArgumentError: If a payload is broken, or of another program, step, plan or
            version. The message names the replica.
    """
    return library.load().top_k_decode(
        payloads=payloads,
        step=tf.convert_to_tensor(step, tf.int64),
        N=len(shapes),
        shapes=list(shapes),
        entries=tensor_of(entries),
        fingerprint=fingerprint,
    )


def top_k_put_back(
    residuals: Sequence[tf.Tensor | tf.Variable],
    payload: tf.Tensor,
    *,
    entries: Settings,
    fingerprint: int,
) -> tf.Operation | None:
    """Adds what a replica had packed back into its residuals, because the step is skipped.

    A payload with the non-finite flag puts nothing back.

    Args:
        residuals: float32 variables or their resource handles, updated in place.
        payload: int32 [words], the replica's own.
        entries: The same as for encoding.
        fingerprint: The same as for encoding.

    Returns:
        The operation in a graph, None in eager execution.

    Raises:
        tf.errors.InvalidArgumentError: If the payload is broken; the residuals are then untouched.
    """
    return library.load().top_k_put_back(
        residuals=handles_of(residuals),
        payload=payload,
        entries=tensor_of(entries),
        fingerprint=fingerprint,
    )


def top_k_keep_velocity(
    velocities: Sequence[tf.Tensor | tf.Variable],
    corrected: Sequence[tf.Tensor],
    payload: tf.Tensor,
    sent: tf.Tensor,
    *,
    entries: Settings,
    fingerprint: int,
) -> tf.Operation | None:
    """Ends a step of momentum: corrected gradients become the velocities, masked where sent.

    A replica whose payload has the non-finite flag keeps the velocities that it had.

    Args:
        velocities: float32 variables or their resource handles, updated in place.
        corrected: What `momentum_correction` returned.
        payload: int32 [words], the replica's own, encoded from `corrected`.
        sent: bool scalar: whether the step counts. Then velocities become zero where the payload
            names an entry (paper, section 3.3: momentum factor masking); those of tensors sent
            whole stay, for nothing in them is late.
        entries: The same as for encoding.
        fingerprint: The same as for encoding.

    Returns:
        The operation in a graph, None in eager execution.

    Raises:
        tf.errors.InvalidArgumentError: If the payload is broken; the velocities are then untouched.
    """
    return library.load().top_k_keep_velocity(
        velocities=handles_of(velocities),
        corrected=list(corrected),
        payload=payload,
        sent=sent,
        entries=tensor_of(entries),
        fingerprint=fingerprint,
    )
