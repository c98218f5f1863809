"""The exchange of ScaleCom with values of fewer bits than 32.

In each variable, values are rounded to shares of one scale. What rounding takes off stays in the
residual. Variables that are sent whole are summed as float32.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.base import ExchangeInputs
from tf_gradcomp.compressors.chunked import FLOAT_BITS, SUMMED_BITS
from tf_gradcomp.compressors.requests import AllGather, AllReduce, Broadcast, Request
from tf_gradcomp.compressors.sums import unless_empty, unless_too_large
from tf_gradcomp.ops.payload import SCALECOM

VALUE_BITS = (FLOAT_BITS, SUMMED_BITS, 8, 4, 1)
_WORD_BITS = 32
_LARGEST_EXACT = 2048  # all whole numbers up to it are float16


def sum_in_few_bits(
    chunked: ops.Chunked,
    inputs: ExchangeInputs,
    offsets: tf.Tensor,
    own_finite: tf.Tensor,
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
        own = tf.gather(ops.chunk_take(chunked, offsets, own_finite), split.coded)
        words = tf.concat([offsets, tf.bitcast(_largest(own, split), tf.int32)], 0)
    words = yield from unless_empty(words, lambda payload: Broadcast(payload, leader))
    offsets, scales = tf.split(words, [tf.size(offsets), tf.size(words) - tf.size(offsets)])
    taken = ops.chunk_take(chunked, offsets, own_finite)
    whole = yield from unless_empty(tf.gather(taken, split.whole), AllReduce)
    # What is not finite is a share of nothing: zeros are sent, beside a flag.
    values = tf.where(own_finite, tf.gather(taken, split.coded), 0.0)
    if bits == SUMMED_BITS:
        of_each = tf.gather(tf.bitcast(scales, tf.float32), split.scale_of)
        coded = yield from sum_shares(values, of_each, own_finite, inputs.size)
    else:
        header = {
            "method": SCALECOM,
            "settings": chunked.chunk_sizes,
            "fingerprint": fingerprint,
        }
        coded = yield from gather_codes(values, split, inputs, own_finite, bits, header)
    totals, fits = unless_too_large(_joined(split, whole, coded.total), coded.finite)
    totals = tf.concat([totals, [0.0]], 0)
    rests = _joined(split, tf.zeros_like(whole), values - coded.sent)
    finite = tf.logical_and(coded.finite, inputs.finite)
    reduced, finite = ops.chunk_apply(
        chunked, offsets, totals, own_finite, finite, rests=rests, filter=filter
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
    values: tf.Tensor, scales: tf.Tensor, own_finite: tf.Tensor, size: int
) -> Generator[AllReduce, tf.Tensor, Summed]:
    """Sums shares of common scales, one scale for each value, in float16.

    The shares are whole numbers of a power of two, and their sum over all replicas is at most 2048.
    So no sum is rounded, in whatever order they are added, and none overflows.
    """
    if size > _LARGEST_EXACT:
        raise ValueError(
            f"Sums of {SUMMED_BITS} bits are for up to {_LARGEST_EXACT} replicas; there are "
            f"{size}. Use {FLOAT_BITS} bits: value_bits={FLOAT_BITS} of ScaleCom, or "
            "latent_dtype='float32' of LGC."
        )
    steps = 2 ** ((_LARGEST_EXACT // size).bit_length() - 1)
    shares = _levels(values, scales, steps) / steps
    flag = tf.where(own_finite, [0.0], [float("nan")])
    given = tf.cast(tf.concat([shares, flag], 0), tf.float16)
    answer = tf.cast((yield AllReduce(given)), tf.float32)
    total, flags = tf.split(answer, [tf.size(shares), 1])
    return Summed(scales * shares, scales * total, tf.reduce_all(tf.math.is_finite(flags)))


def gather_codes(
    values: tf.Tensor,
    split: ops.ChunkSplit,
    inputs: ExchangeInputs,
    own_finite: tf.Tensor,
    bits: int,
    header: dict[str, Any],
) -> Generator[AllGather, tf.Tensor, Summed]:
    """Gathers codes of a few bits, behind this replica's own scales."""
    shares = _shares(bits)
    if bits == 1:
        scales = _mean(values, split)
        codes = tf.cast(values < 0, tf.int32)
    else:
        scales = _largest(values, split)
        steps = 2 ** (bits - 1) - 1
        levels = _levels(values, tf.gather(scales, split.scale_of), steps)
        codes = tf.cast(levels, tf.int32) + (steps + 1)
    body = tf.concat([tf.bitcast(scales, tf.int32), _packed(codes, bits)], 0)
    payload = ops.payload_write(body, inputs.step, own_finite, **header)
    payloads = yield AllGather(payload, same_length=True)
    bodies, finite = ops.payload_read(payloads, inputs.step, **header)
    of_all, words = tf.split(bodies, [tf.size(scales), tf.shape(bodies)[1] - tf.size(scales)], 1)
    scales_of_all = tf.gather(tf.bitcast(of_all, tf.float32), split.scale_of, axis=1)
    codes_of_all = tf.slice(_unpacked(words, bits), [0, 0], [-1, tf.size(codes)])
    received = scales_of_all * tf.gather(shares, codes_of_all)
    return Summed(
        tf.gather(scales, split.scale_of) * tf.gather(shares, codes),
        # In the order of the replicas, as a reduction need not be.
        tf.gather(tf.cumsum(received, 0), inputs.size - 1),
        finite,
    )


def _levels(values: tf.Tensor, scales: tf.Tensor, steps: int) -> tf.Tensor:
    """The nearest whole numbers; the number `steps` stands for the scale."""
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


def _largest(values: tf.Tensor, split: ops.ChunkSplit) -> tf.Tensor:
    """The largest magnitude of the values of each scale."""
    largest = tf.math.unsorted_segment_max(tf.abs(values), split.scale_of, tf.size(split.counts))
    return tf.ensure_shape(largest, split.counts.shape)


def _mean(values: tf.Tensor, split: ops.ChunkSplit) -> tf.Tensor:
    """The mean magnitude of the values of each scale, summed in float64."""
    magnitudes = tf.cast(tf.abs(values), tf.float64)
    sums = tf.math.unsorted_segment_sum(magnitudes, split.scale_of, tf.size(split.counts))
    means = tf.cast(sums / tf.cast(split.counts, tf.float64), tf.float32)
    return tf.ensure_shape(means, split.counts.shape)


def _packed(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """Codes in whole words, the first in the lowest bits; int32 [words]."""
    per_word = _WORD_BITS // bits
    padded = tf.pad(codes, [[0, -tf.size(codes) % per_word]])
    shifted = tf.bitwise.left_shift(tf.reshape(padded, [-1, per_word]), _shifts(bits))
    return tf.reduce_sum(shifted, 1)


def _unpacked(words: tf.Tensor, bits: int) -> tf.Tensor:
    """The codes in each row of words, with those that fill up the last word."""
    shifted = tf.bitwise.right_shift(tf.expand_dims(words, 2), _shifts(bits))
    codes = tf.bitwise.bitwise_and(shifted, 2**bits - 1)
    rows, length = tf.unstack(tf.shape(words))
    return tf.reshape(codes, [rows, length * (_WORD_BITS // bits)])


def _shifts(bits: int) -> tf.Tensor:
    return tf.range(0, _WORD_BITS, bits)


def _joined(split: ops.ChunkSplit, whole: tf.Tensor, coded: tf.Tensor) -> tf.Tensor:
    """The values of all chunks, in their order."""
    return tf.dynamic_stitch([split.whole, split.coded], [whole, coded])
