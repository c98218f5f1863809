"""Ops on one entry per chunk, and with chunks of one entry on all entries.

Sums one entry per chunk, at positions that are equal on all replicas: ScaleCom and RandomK. LGC
uses the same ops with chunks of one entry.

Each tensor is cut into chunks, and one entry of each chunk travels. The position of the entry is an
offset in the chunk, in as many bits as the chunk needs. The offsets of a tensor are packed, the
first in the lowest bits. Zeros fill the last int32 word.

With m the residual and g the gradient of a variable, I the chosen positions and beta the filter
(Chen et al., "ScaleCom", NeurIPS 2020, https://arxiv.org/abs/2104.11125):

    y = m + g
    sent: y at I
    m <- m + beta g               elsewhere
    m <- (1 - beta) m             at I

If rounding leaves a part of y unsent, m takes beta times this part at I, too.

All arithmetic is float32, in this order, without fused multiply-add.
`tests.reference.chunks` is the same in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp.ops import library
from tf_gradcomp.ops.payload import Settings, handles_of, tensor_of

MAX_CHUNK_SIZE = 65536


class Chunked(NamedTuple):
    """The input of all of these ops, for one replica.

    Attributes:
        residuals: float32 variables or their resource handles.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        chunk_sizes: One per tensor, 1 to 65536; with 1, every entry is sent. Chunks may change
            between steps.
    """

    residuals: Sequence[tf.Tensor | tf.Variable]
    gradients: Sequence[tf.Tensor]
    chunk_sizes: Settings

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of an op."""
        return {
            "residuals": handles_of(self.residuals),
            "gradients": list(self.gradients),
            "chunk_sizes": tensor_of(self.chunk_sizes),
        }


def chunk_select(chunked: Chunked, lead: tf.Tensor | bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Chooses the first entry of largest magnitude in each chunk.

    Args:
        chunked: The sums to choose from; they stay as they are.
        lead: bool scalar. If false, nothing is chosen, and offsets are zeros.

    Returns:
        offsets, int32 [words]; and finite, bool scalar: whether all of y is finite.
    """
    return library.load().chunk_select(lead=lead, **chunked.arguments())


def chunk_draw(chunked: Chunked, step: tf.Tensor | int) -> tf.Tensor:
    """Chooses an entry of each chunk from the step only; returns offsets, int32 [words]."""
    step = tf.convert_to_tensor(step, tf.int64)
    return library.load().chunk_draw(step=step, **chunked.arguments())


class ChunkSplit(NamedTuple):
    """The chosen entries that may be sent in a few bits, and their scales.

    Attributes:
        whole: int32 [n], the indices of entries in tensors with chunks of one, sent as float32.
        coded: int32 [m], the indices of the other entries, sent in a few bits.
        scale_indices: int32 [m], the index of each coded entry's scale; each tensor has a scale.
        counts: int64 [scales], the number of entries of each scale.
    """

    whole: tf.Tensor
    coded: tf.Tensor
    scale_indices: tf.Tensor
    counts: tf.Tensor


def chunk_split(chunked: Chunked) -> ChunkSplit:
    """Separates the entries sent as float32 from those sent in a few bits."""
    return ChunkSplit(*library.load().chunk_split(**chunked.arguments()))


def chunk_take(chunked: Chunked, offsets: tf.Tensor, finite: tf.Tensor | bool) -> tf.Tensor:
    """Gathers the values that this replica adds to the sum.

    Args:
        chunked: The sums to take from; they stay as they are.
        offsets: int32 [words], the same on all replicas.
        finite: bool scalar, whether this replica's gradients are finite.

    Returns:
        float32 [chunks + 1]: y at the chosen positions; then 0, or NaN if `finite` is false.
    """
    return library.load().chunk_take(offsets=offsets, finite=finite, **chunked.arguments())


def chunk_apply(
    chunked: Chunked,
    offsets: tf.Tensor,
    totals: tf.Tensor,
    local_finite: tf.Tensor | bool,
    finite: tf.Tensor | bool,
    *,
    rests: tf.Tensor | None = None,
    filter: float = 1.0,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Ends a step: spreads the totals over dense tensors, and keeps unsent values as residuals.

    If the step is skipped, a replica with finite gradients keeps its whole gradient.

    Args:
        chunked: Its residuals are updated in place.
        offsets: int32 [words], the same on all replicas.
        totals: float32 [chunks + 1], the sum over the replicas of `chunk_take`.
        local_finite: bool scalar, whether this replica's gradients are finite.
        finite: bool scalar; if false, the step is skipped.
        rests: float32 [chunks], the part of y at the chosen positions that this replica did not
            send; None means zeros.
        filter: beta above, in (0, 1].

    Returns:
        reduced, one float32 tensor per gradient, zeros on a skipped step; and all_finite, bool
        scalar: whether the step is taken.
    """
    return library.load().chunk_apply(
        offsets=offsets,
        totals=totals,
        local_finite=local_finite,
        finite=finite,
        rests=tf.zeros([0]) if rests is None else rests,
        filter=filter,
        **chunked.arguments(),
    )
