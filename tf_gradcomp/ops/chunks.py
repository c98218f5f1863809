"""Sums of one entry per chunk, at places that all replicas agree on: ScaleCom and RandomK.

Tensors of one group are cut into chunks as if they lay one behind the other; one entry of each
chunk travels. Where it lies is an offset in the chunk, of as many bits as the chunk needs; offsets
of a group are packed, the first in the lowest bits, and fill whole int32 words with zeros.

With m the residual and g the gradient of a variable, I the chosen places and beta the filter
(Chen et al., "ScaleCom", NeurIPS 2020, https://arxiv.org/abs/2104.11125):

    y = m + g
    sent: y at I
    m <- m + beta g               elsewhere
    m <- (1 - beta) m             at I

If what is sent is y less a rest, as of values that are rounded, beta times the rest is added at I.

All arithmetic is float32, in this order, without fused multiply-add.
`tests.reference.chunks` is the same in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp.ops import library
from tf_gradcomp.ops.handles import handles_of
from tf_gradcomp.ops.settings import Settings, tensor_of

MAX_CHUNK_SIZE = 65536


class Chunked(NamedTuple):
    """What all of these ops work on, for one replica.

    Attributes:
        residuals: float32 variables or their resource handles.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        chunk_sizes: One per tensor, 1 to 65536; with 1, every entry is sent. They and the groups
            may change between steps.
        groups: One number per tensor; those with the same number have one chunk size, and are cut
            as if they were one tensor.
    """

    residuals: Sequence[tf.Tensor | tf.Variable]
    gradients: Sequence[tf.Tensor]
    chunk_sizes: Settings
    groups: Settings

    def arguments(self) -> dict[str, Any]:
        """The arguments as the ops take them."""
        return {
            "residuals": handles_of(self.residuals),
            "gradients": list(self.gradients),
            "chunk_sizes": tensor_of(self.chunk_sizes),
            "groups": tensor_of(self.groups),
        }


def chunk_select(chunked: Chunked, lead: tf.Tensor | bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Chooses the entry of largest magnitude in each chunk, the first of equals.

    Args:
        chunked: What to choose from; nothing is changed.
        lead: bool scalar. If false, nothing is chosen, and offsets are zeros.

    Returns:
        offsets, int32 [words]; and finite, bool scalar: whether all of y is.

    Raises:
        tf.errors.InvalidArgumentError: If shapes, chunk sizes or groups are wrong.
    """
    return library.load().chunk_select(lead=lead, **chunked.arguments())


def chunk_draw(chunked: Chunked, step: tf.Tensor | int, *, seed: int) -> tf.Tensor:
    """Chooses an entry of each chunk at random, by seed and step alone; offsets, int32 [words]."""
    step = tf.convert_to_tensor(step, tf.int64)
    return library.load().chunk_draw(step=step, seed=seed, **chunked.arguments())


class ChunkSplit(NamedTuple):
    """Which of the chosen entries may be sent in a few bits, and by which scale.

    Attributes:
        whole: int32 [n], the numbers of the entries of chunks of one: their tensors are sent whole.
        coded: int32 [m], the numbers of the others.
        scale_of: int32 [m], the number of the scale of each: there is one for each group.
        counts: int64 [scales], how many there are of each scale.
    """

    whole: tf.Tensor
    coded: tf.Tensor
    scale_of: tf.Tensor
    counts: tf.Tensor


def chunk_split(chunked: Chunked) -> ChunkSplit:
    """Tells the entries of tensors that are sent whole from the others; see `ChunkSplit`."""
    return ChunkSplit(*library.load().chunk_split(**chunked.arguments()))


def chunk_take(chunked: Chunked, offsets: tf.Tensor, finite: tf.Tensor | bool) -> tf.Tensor:
    """What a replica gives to be summed.

    Args:
        chunked: What to take from; nothing is changed.
        offsets: int32 [words], the same on all replicas.
        finite: bool scalar, whether this replica's gradients are.

    Returns:
        float32 [chunks + 1]: y at the chosen places; then 0, or NaN where it is not finite.

    Raises:
        tf.errors.InvalidArgumentError: If an offset is not valid, as from a broken replica.
    """
    return library.load().chunk_take(offsets=offsets, finite=finite, **chunked.arguments())


def chunk_apply(
    chunked: Chunked,
    offsets: tf.Tensor,
    totals: tf.Tensor,
    own_finite: tf.Tensor | bool,
    finite: tf.Tensor | bool,
    *,
    rests: tf.Tensor | None = None,
    filter: float = 1.0,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Ends a step: spreads the totals over dense tensors, and keeps what was not sent.

    Where the step is to be skipped, a replica that is finite itself keeps its whole gradient.

    Args:
        chunked: Its residuals are updated in place.
        offsets: int32 [words], the same on all replicas.
        totals: float32 [chunks + 1], the sum of what `chunk_take` gave.
        own_finite: bool scalar, whether this replica's gradients are finite.
        finite: bool scalar; where it is false, the step is skipped whatever the totals are.
        rests: float32 [chunks], what y is at the chosen places beyond what this replica sent of
            it; None: nothing.
        filter: beta above, in (0, 1].

    Returns:
        reduced, one float32 tensor per gradient, zeros on a skipped step; and all_finite, bool
        scalar: whether the step is taken.

    Raises:
        tf.errors.InvalidArgumentError: If an offset is not valid, or totals or rests have another
            length.
    """
    return library.load().chunk_apply(
        offsets=offsets,
        totals=totals,
        own_finite=own_finite,
        finite=finite,
        rests=tf.zeros([0]) if rests is None else rests,
        filter=filter,
        **chunked.arguments(),
    )
