"""The exchange of ScaleCom with values of fewer than 32 bits; TopK uses the same codes.

In each variable, values are rounded to shares of one scale. Rounding errors stay in the residual.
Variables that are sent whole are summed as float32.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import (
    FLOAT_BITS,
    SUMMED_BITS,
    request_unless_empty,
    zero_if_too_large,
)
from tf_gradcomp.compressors.base import StepInputs
from tf_gradcomp.compressors.requests import AllGather, AllReduce, Broadcast, Request
from tf_gradcomp.ops.payload import SCALECOM

VALUE_BITS = (FLOAT_BITS, SUMMED_BITS, 8, 4, 1)
_WORD_BITS = 32
_LARGEST_EXACT = 2048  # float16 holds all whole numbers up to it


def sum_in_few_bits(
    chunked: ops.Chunked,
    inputs: StepInputs,
    offsets: tf.Tensor,
    local_finite: tf.Tensor,
    leader: tf.Tensor,
    bits: int,
    filter: float,
    fingerprint: int,
) -> Generator[Request, tf.Tensor, tuple[list[tf.Tensor], tf.Tensor]]:
    """Broadcasts the leader's offsets, and sums the entries there.

    Returns the reduced gradients, and whether they are finite.
    """
    split = ops.chunk_split(chunked)
    words = offsets
    if bits == SUMMED_BITS:
        values_to_code = tf.gather(ops.chunk_take(chunked, offsets, local_finite), split.coded)
        scales = _largest(values_to_code, split.scale_indices, split.counts)
        words = tf.concat([offsets, tf.bitcast(scales, tf.int32)], 0)
    words = yield from request_unless_empty(words, lambda payload: Broadcast(payload, leader))
    offsets, scales = tf.split(words, [tf.size(offsets), tf.size(words) - tf.size(offsets)])
    taken = ops.chunk_take(chunked, offsets, local_finite)
    whole_sums = yield from request_unless_empty(tf.gather(taken, split.whole), AllReduce)
    # A non-finite value has no share of a scale: zeros are sent, with a flag.
    values = tf.where(local_finite, tf.gather(taken, split.coded), 0.0)
    if bits == SUMMED_BITS:
        entry_scales = tf.gather(tf.bitcast(scales, tf.float32), split.scale_indices)
        coded = yield from sum_shares(values, entry_scales, local_finite, inputs.size)
    else:
        header = {
            "method": SCALECOM,
            "settings": chunked.chunk_sizes,
            "fingerprint": fingerprint,
        }
        coded = yield from gather_codes(values, split, inputs, local_finite, bits, header)
    totals, fits = zero_if_too_large(_joined(split, whole_sums, coded.total), coded.finite)
    totals = tf.concat([totals, [0.0]], 0)
    rests = _joined(split, tf.zeros_like(whole_sums), values - coded.sent)
    finite = tf.logical_and(coded.finite, inputs.finite)
    reduced, finite = ops.chunk_apply(
        chunked, offsets, totals, local_finite, finite, rests=rests, filter=filter
    )
    return reduced, tf.logical_and(finite, fits)


class Summed(NamedTuple):
    """Result of summing values of few bits.

    Attributes:
        sent: The values that this replica sent, as float32.
        total: The sum of the values that all replicas sent.
        finite: Whether the values of all replicas are finite; the total may still be too large.
    """

    sent: tf.Tensor
    total: tf.Tensor
    finite: tf.Tensor


def sum_shares(
    values: tf.Tensor, scales: tf.Tensor, local_finite: tf.Tensor, size: int
) -> Generator[AllReduce, tf.Tensor, Summed]:
    """Sums shares of common scales, one scale for each value, in float16.

    The shares are whole numbers of a power of two, and their sum over all replicas is at most 2048.
    Sums are therefore neither rounded nor overflow, in any order of the shares.
    """
    if size > _LARGEST_EXACT:
        raise ValueError(
            f"Sums of {SUMMED_BITS} bits are for up to {_LARGEST_EXACT} replicas; there are "
            f"{size}. Use {FLOAT_BITS} bits: value_bits={FLOAT_BITS} of ScaleCom, or "
            "latent_dtype='float32' of LGC."
        )
    steps = 2 ** ((_LARGEST_EXACT // size).bit_length() - 1)
    shares = _levels(values, scales, steps) / steps
    flag = tf.where(local_finite, [0.0], [float("nan")])
    message = tf.cast(tf.concat([shares, flag], 0), tf.float16)
    answer = tf.cast((yield AllReduce(message)), tf.float32)
    total, flags = tf.split(answer, [tf.size(shares), 1])
    return Summed(scales * shares, scales * total, tf.reduce_all(tf.math.is_finite(flags)))


def gather_codes(
    values: tf.Tensor,
    split: ops.ChunkSplit,
    inputs: StepInputs,
    local_finite: tf.Tensor,
    bits: int,
    header: dict[str, Any],
) -> Generator[AllGather, tf.Tensor, Summed]:
    """Gathers codes of a few bits, which follow this replica's scales."""
    scales, codes = encode_values(values, split.scale_indices, split.counts, bits)
    body = tf.concat([tf.bitcast(scales, tf.int32), _packed(codes, bits)], 0)
    payload = ops.payload_write(body, inputs.step, local_finite, **header)
    payloads = yield AllGather(payload, same_length=True)
    bodies, finite, _ = ops.payload_read(payloads, inputs.step, **header)
    scale_words, words = tf.split(
        bodies, [tf.size(scales), tf.shape(bodies)[1] - tf.size(scales)], 1
    )
    all_codes = tf.slice(_unpacked(words, bits), [0, 0], [-1, tf.size(codes)])
    all_scales = tf.bitcast(scale_words, tf.float32)
    received = decode_values(all_scales, all_codes, split.scale_indices, bits)
    return Summed(
        decode_values(scales[tf.newaxis], codes[tf.newaxis], split.scale_indices, bits)[0],
        # Adds in the order of the replicas, which a reduction does not guarantee.
        tf.gather(tf.cumsum(received, 0), inputs.size - 1),
        finite,
    )


def encode_values(
    values: tf.Tensor, scale_indices: tf.Tensor, counts: tf.Tensor, bits: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the scales of values, float32, and a code for each value, int32.

    Args:
        values: float32 [n].
        scale_indices: int32 [n], the number of each value's tensor.
        counts: int64 [tensors], the number of values of each tensor.
        bits: 16, 8, 4, 2 or 1. With 2, each tensor has two scales; otherwise, it has one scale.
    """
    signs = tf.cast(values < 0, tf.int32)
    if bits == 1:
        return _mean(values, scale_indices, counts), signs
    if bits == 2:
        above = tf.abs(values) > tf.gather(_mean(values, scale_indices, counts), scale_indices)
        which = 2 * scale_indices + tf.cast(above, tf.int32)
        group_sizes = tf.math.unsorted_segment_sum(tf.ones_like(which), which, 2 * tf.size(counts))
        return _mean(values, which, group_sizes), signs + 2 * tf.cast(above, tf.int32)
    scales = _largest(values, scale_indices, counts)
    steps = 2 ** (bits - 1) - 1
    levels = _levels(values, tf.gather(scales, scale_indices), steps)
    return scales, tf.cast(levels, tf.int32) + (steps + 1)


def decode_values(
    scales: tf.Tensor, codes: tf.Tensor, scale_indices: tf.Tensor, bits: int
) -> tf.Tensor:
    """Returns the values of codes; float32 [replicas, n].

    Args:
        scales: float32 [replicas, scales].
        codes: int32 [replicas, n].
        scale_indices: As for `encode_values`.
        bits: As for `encode_values`.
    """
    if bits != 2:
        return tf.gather(scales, scale_indices, axis=1) * tf.gather(_shares(bits), codes)
    code_scales = tf.gather(scales, 2 * scale_indices + codes // 2, axis=1, batch_dims=1)
    return code_scales * tf.gather(_shares(1), codes % 2)


def _levels(values: tf.Tensor, scales: tf.Tensor, steps: int) -> tf.Tensor:
    """Returns the nearest levels from -steps to steps; level `steps` is the scale itself."""
    shares = tf.clip_by_value(tf.math.divide_no_nan(values, scales), -1.0, 1.0)
    return tf.round(shares * steps)


def _shares(bits: int) -> np.ndarray:
    """Returns the value of each code, as a share of the scale.

    The values form a table, because TensorFlow may change the order of multiplications in a graph.
    """
    if bits == 1:
        return np.array([1, -1], np.float32)
    steps = 2 ** (bits - 1) - 1
    return np.arange(-steps - 1, steps + 1, dtype=np.float32) / np.float32(steps)


def _largest(values: tf.Tensor, scale_indices: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """The largest magnitude of the values of each scale."""
    largest = tf.math.unsorted_segment_max(tf.abs(values), scale_indices, tf.size(counts))
    return tf.ensure_shape(largest, counts.shape)


def _mean(values: tf.Tensor, scale_indices: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """The mean magnitude of the values of each scale, summed in float64; 0 without values."""
    magnitudes = tf.cast(tf.abs(values), tf.float64)
    sums = tf.math.unsorted_segment_sum(magnitudes, scale_indices, tf.size(counts))
    means = tf.cast(tf.math.divide_no_nan(sums, tf.cast(counts, tf.float64)), tf.float32)
    return tf.ensure_shape(means, counts.shape)


def _packed(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """Codes in whole words, the first in the lowest bits; int32 [words]."""
    per_word = _WORD_BITS // bits
    padded = tf.pad(codes, [[0, -tf.size(codes) % per_word]])
    shifted = tf.bitwise.left_shift(tf.reshape(padded, [-1, per_word]), _shifts(bits))
    return tf.reduce_sum(shifted, 1)


def _unpacked(words: tf.Tensor, bits: int) -> tf.Tensor:
    """The codes in each row of words, including padding in the last word."""
    shifted = tf.bitwise.right_shift(tf.expand_dims(words, 2), _shifts(bits))
    codes = tf.bitwise.bitwise_and(shifted, 2**bits - 1)
    rows, length = tf.unstack(tf.shape(words))
    return tf.reshape(codes, [rows, length * (_WORD_BITS // bits)])


def _shifts(bits: int) -> tf.Tensor:
    return tf.range(0, _WORD_BITS, bits)


def _joined(split: ops.ChunkSplit, whole_sums: tf.Tensor, coded: tf.Tensor) -> tf.Tensor:
    """The values of all chunks, in their order."""
    return tf.dynamic_stitch([split.whole, split.coded], [whole_sums, coded])
