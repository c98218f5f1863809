"""TopK: the ops of one step.

`tests.reference.top_k` computes the same in NumPy. Results depend neither on the number of threads
nor on the processor.

Source of the momentum correction: Lin et al., "Deep Gradient Compression: Reducing the
Communication Bandwidth for Distributed Training", ICLR 2018, https://arxiv.org/abs/1712.01887.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp.ops import coding, library
from tf_gradcomp.ops.coding import Settings, handles_of, tensor_of


def momentum_correction(
    velocities: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor],
    *,
    momentum: float,
    clip_norm: float = math.inf,
) -> list[tf.Tensor]:
    """Clips the gradients of a replica and adds them to its decayed velocities.

    All arithmetic is float32, without fused multiply-add; the norm is summed in float64, in a fixed
    order.

    Args:
        velocities: float32, one per gradient in its shape; or an empty list.
        gradients: float32, float16 or bfloat16, any shapes.
        momentum: The factor of the velocities.
        clip_norm: The largest global norm of the gradients; larger gradients are scaled down to it.

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
    """Packs the largest entries of residuals plus gradients, as `ops.coding.encode` describes.

    Among entries with equal magnitudes, the first are sent. A tensor takes 2 words of the payload
    for each entry, or one word for each element if it is sent whole.

    Args:
        residuals: See `ops.coding.encode`.
        gradients: See `ops.coding.encode`.
        step: See `ops.coding.encode`.
        entries: The number of entries to send of each tensor, or 0 to send the tensor whole,
            without indices. The numbers may change between steps; the payload's header has a digest
            of them.
        fingerprint: See `ops.coding.encode`.
    """
    return coding.encode(
        "top_k",
        residuals,
        gradients,
        step,
        entries=entries,
        fingerprint=fingerprint,
    )


top_k_decode = functools.partial(coding.decode, "top_k")
top_k_put_back = functools.partial(coding.put_back, "top_k")


def top_k_keep_velocity(
    velocities: Sequence[tf.Tensor | tf.Variable],
    corrected: Sequence[tf.Tensor],
    payload: tf.Tensor,
    sent: tf.Tensor,
    *,
    entries: Settings,
    fingerprint: int,
) -> tf.Operation | None:
    """Ends a step of momentum: stores the corrected gradients as velocities, masked where sent.

    A replica whose payload has the non-finite flag keeps its old velocities.

    Args:
        velocities: float32 variables or their resource handles, updated in place.
        corrected: The result of `momentum_correction`.
        payload: int32 [words], the replica's own, encoded from `corrected`.
        sent: bool scalar: whether the step is taken. Velocities then become zero where the payload
            names an entry (paper, section 3.3: momentum factor masking). The velocities of tensors
            sent whole stay, because none of their entries is delayed.
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
