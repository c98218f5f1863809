"""The exchange of the methods that sum one entry of each chunk, where all replicas agree on it."""

from __future__ import annotations

import collections
from collections.abc import Generator, Sequence

import numpy as np
import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.base import ExchangeInputs
from tf_gradcomp.compressors.wishes import AllReduce


def sum_chosen(
    chunked: ops.Chunked,
    inputs: ExchangeInputs,
    offsets: tf.Tensor,
    own_finite: tf.Tensor,
    filter: float = 1.0,
) -> Generator[AllReduce, tf.Tensor, tuple[list[tf.Tensor], tf.Tensor]]:
    """Sums the chosen entries over the replicas; the reduced gradients, and whether they are."""
    values = ops.chunk_take(chunked, offsets, own_finite)
    totals = yield AllReduce(values)
    return ops.chunk_apply(chunked, offsets, totals, own_finite, inputs.finite, filter=filter)


def tensor_bytes(
    chunked: ops.Chunked, sizes: Sequence[int], leaders: int | None = None
) -> tf.Tensor:
    """Bytes that each tensor takes of a payload, rounded down, as `Exchanged` has them.

    Args:
        chunked: How the tensors are grouped and cut.
        sizes: Their elements.
        leaders: How many replicas send offsets in turn; None where they do not travel.
    """
    totals: collections.Counter[int] = collections.Counter()
    for group, size in zip(chunked.groups, sizes, strict=True):
        totals[group] += size
    counted = []
    for group, size, chunk_size in zip(chunked.groups, sizes, chunked.chunk_sizes, strict=True):
        chunks = -(-totals[group] // chunk_size)
        turns = leaders or 1
        bits = 32 * turns + (0 if leaders is None else (chunk_size - 1).bit_length())
        counted.append(chunks * bits * size // (8 * turns * max(1, totals[group])))
    return tf.constant(np.array(counted, np.int64))
