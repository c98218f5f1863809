"""The exchange of methods that sum one entry per chunk, the same on all replicas."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.base import ExchangeInputs
from tf_gradcomp.compressors.per_variable import Valid, is_number
from tf_gradcomp.compressors.requests import AllReduce
from tf_gradcomp.compressors.sums import zero_if_too_large
from tf_gradcomp.ops.chunks import MAX_CHUNK_SIZE

CHUNK_SHARE = Valid(  # of entries, if one of each chunk is sent
    f"a number from 1/{MAX_CHUNK_SIZE} to 1",
    lambda share: is_number(share) and 1 / MAX_CHUNK_SIZE <= share <= 1,
)
FLOAT_BITS = 32
SUMMED_BITS = 16


def sum_chosen(
    chunked: ops.Chunked,
    inputs: ExchangeInputs,
    offsets: tf.Tensor,
    own_finite: tf.Tensor,
    filter: float = 1.0,
) -> Generator[AllReduce, tf.Tensor, tuple[list[tf.Tensor], tf.Tensor]]:
    """Sums the chosen entries; returns the reduced gradients, and whether they are finite."""
    values = ops.chunk_take(chunked, offsets, own_finite)
    totals = yield AllReduce(values)
    totals, fits = zero_if_too_large(totals, tf.math.is_finite(totals[-1]))
    reduced, finite = ops.chunk_apply(
        chunked, offsets, totals, own_finite, inputs.finite, filter=filter
    )
    return reduced, tf.logical_and(finite, fits)


def tensor_bytes(
    chunked: ops.Chunked,
    sizes: Sequence[int],
    leaders: int | None = None,
    value_bits: int = FLOAT_BITS,
) -> tf.Tensor:
    """Returns the bytes of each tensor in a payload, rounded down; int64 [tensors].

    `leaders` is the number of replicas that send offsets in turn; None if offsets are not sent.
    """
    chunk_sizes = tf.convert_to_tensor(chunked.chunk_sizes, tf.int64)
    elements = tf.constant(sizes, tf.int64)
    turns = leaders or 1
    coded = chunk_sizes > 1
    bits = tf.where(coded, tf.constant(value_bits, tf.int64), FLOAT_BITS) * turns
    bits += 0 if leaders is None else _offset_bits(chunk_sizes)
    of_scale = 0 if value_bits == FLOAT_BITS else FLOAT_BITS
    if value_bits != SUMMED_BITS:  # whose scales only the leader sends
        of_scale *= turns
    has_scale = tf.logical_and(coded, elements > 0)
    of_scales = tf.where(has_scale, tf.constant(of_scale, tf.int64), 0)
    return (-(-elements // chunk_sizes) * bits + of_scales) // (8 * turns)


def _offset_bits(chunk_sizes: tf.Tensor) -> tf.Tensor:
    """Bits of an offset in a chunk; int64 [tensors]."""
    powers = tf.constant([2**bits for bits in range(MAX_CHUNK_SIZE.bit_length())], tf.int64)
    return tf.math.count_nonzero(chunk_sizes[:, tf.newaxis] > powers, 1)
