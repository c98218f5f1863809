"""Ops on one entry per chunk, and on entries that a leader selects.

Sums one entry per chunk, at positions that are equal on all replicas: ScaleCom and RandomK.

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

Ops that sum entries at positions that a leader has chosen for all replicas; used by LGC.

For each tensor, either the entries of largest magnitude are chosen, or the tensor is sent whole.
With m the residual and g the gradient of a variable, and I the chosen positions, or all positions
of a tensor that is sent whole:

    y = m + g
    contributed: y at I
    m <- y            elsewhere
    m <- the part of y at I that was not sent

All arithmetic is float32. Results don't depend on the number of threads.

Source: Abrahamyan et al., "Learned Gradient Compression for Distributed Deep Learning", IEEE TNNLS
33(12), https://arxiv.org/abs/2103.08870. `tests.reference.lgc` chooses the same in NumPy.
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


def chunk_draw(chunked: Chunked, step: tf.Tensor | int, *, seed: int) -> tf.Tensor:
    """Chooses an entry of each chunk from seed and step only; returns offsets, int32 [words]."""
    step = tf.convert_to_tensor(step, tf.int64)
    return library.load().chunk_draw(step=step, seed=seed, **chunked.arguments())


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
        float32 [chunks + 1]: y at the chosen places; then 0, or NaN if `finite` is false.
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
        rests: float32 [chunks], the part of y at the chosen places that this replica did not
            send; None means zeros.
        filter: beta above, in (0, 1].

    Returns:
        reduced, one float32 tensor per gradient, zeros on a skipped step; and all_finite, bool
        scalar: whether the step is taken.
    """
    return library.load().chunk_apply(
        offsets=offsets,
        totals=totals,
        own_finite=local_finite,
        finite=finite,
        rests=tf.zeros([0]) if rests is None else rests,
        filter=filter,
        **chunked.arguments(),
    )


class LeaderSelection(NamedTuple):
    """The arguments that these ops share, for one replica.

    Attributes:
        residuals: float32 variables or their resource handles.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        entries: The number of chosen entries of each tensor, up to its size, which must then be
            below 2^31; 0: the tensor is sent whole.
    """

    residuals: Sequence[tf.Tensor | tf.Variable]
    gradients: Sequence[tf.Tensor]
    entries: Settings

    def arguments(self) -> dict[str, Any]:
        """The arguments as the ops take them."""
        return {
            "residuals": handles_of(self.residuals),
            "gradients": list(self.gradients),
            "entries": tensor_of(self.entries),
        }


def leader_index_words(elements: int, entries: int) -> int:
    """Returns the number of int32 words for the positions of some entries of a tensor.

    The positions are packed, the lowest bits first, each with the bits that the last position of
    the tensor needs.

    Args:
        elements: The tensor's size.
        entries: The number of chosen entries.
    """
    return -(-entries * max(1, (elements - 1).bit_length()) // 32)


def leader_select(
    selection: LeaderSelection, lead: tf.Tensor | bool, *, order: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Chooses the entries of largest magnitude of each tensor, the first of equal entries.

    Args:
        selection: The tensors; nothing is changed.
        lead: bool scalar. If false, nothing is chosen, and places are zeros.
        order: Of the entries of a tensor: `"value"`, ascending; `"index"`, ascending; or
            `"magnitude"`, descending. Equal values keep their order.

    Returns:
        places, int32 [words], tensor by tensor (see `leader_index_words`), all zeros if y is not
        finite; and finite, bool scalar: whether all of y is.
    """
    return library.load().leader_select(lead=lead, order=order, **selection.arguments())


def leader_take(
    selection: LeaderSelection, indices: tf.Tensor, finite: tf.Tensor | bool
) -> tf.Tensor:
    """Returns a replica's values: y at the positions, and all of y for tensors that are sent whole.

    Args:
        selection: The tensors; nothing is changed.
        indices: int32 [words], as `leader_select` made them on one replica.
        finite: bool scalar, whether this replica's y is. If not, zeros are returned.

    Returns:
        float32 [values], tensor by tensor.
    """
    return library.load().leader_take(places=indices, finite=finite, **selection.arguments())


def leader_apply(
    selection: LeaderSelection,
    indices: tf.Tensor,
    totals: tf.Tensor,
    rests: tf.Tensor,
    local_finite: tf.Tensor | bool,
    finite: tf.Tensor | bool,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Ends a step: spreads the totals over dense tensors, and keeps unsent values.

    If the step is skipped, a replica with finite gradients keeps its whole gradient.

    Args:
        selection: Its residuals are updated in place.
        indices: int32 [words], as `leader_select` made them on one replica.
        totals: float32 [values], the sum of what all replicas sent, in the order of `leader_take`.
        rests: float32 [at most values], the unsent parts of the first values that `leader_take`
            returned. The other values were sent unchanged.
        local_finite: bool scalar, whether this replica's y is finite.
        finite: bool scalar; if false, the step is skipped.

    Returns:
        reduced, one float32 tensor per gradient, zeros on a skipped step; and all_finite, bool
        scalar: whether the step is taken.
    """
    return library.load().leader_apply(
        places=indices,
        totals=totals,
        rests=rests,
        own_finite=local_finite,
        finite=finite,
        **selection.arguments(),
    )
