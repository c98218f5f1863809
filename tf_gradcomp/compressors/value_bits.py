"""The exchange of ScaleCom with values of fewer bits than 32.

In each variable, or group of variables that are cut into chunks together, values are rounded to
levels of one scale. What rounding takes off stays in the residual. Variables that are sent whole
are summed as float32.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.base import ExchangeInputs
from tf_gradcomp.compressors.chunked import FLOAT_BITS, SUMMED_BITS
from tf_gradcomp.compressors.maybe_empty import unless_empty
from tf_gradcomp.compressors.wishes import AllGather, AllReduce, Broadcast, Wish
from tf_gradcomp.ops.payload import SCALECOM

VALUE_BITS = (FLOAT_BITS, SUMMED_BITS, 8, 4, 1)
_WORD_BITS = 32
_LARGEST_EXACT = 2048  # all whole numbers up to it are float16


class Layout(NamedTuple):
    """Which of the chosen entries, one of each chunk, are sent in few bits, and by which scale.

    Attributes:
        whole: int32 [n], the numbers of those that are sent as float32.
        coded: int32 [m], the numbers of the others.
        scale_of: int32 [m], the number of the scale of each.
        counts: int64 [scales], how many there are of each scale.
    """

    whole: tf.Tensor
    coded: tf.Tensor
    scale_of: tf.Tensor
    counts: tf.Tensor


def layout_of(sizes: Sequence[int], chunk_sizes: tf.Tensor, groups: tf.Tensor) -> Layout:
    """The layout of the chunks of all tensors; chunks of one entry are sent whole.

    Args:
        sizes: The number of elements of each tensor.
        chunk_sizes: int64 [tensors], as `ops.Chunked` has them.
        groups: int64 [tensors], likewise.
    """
    unique, place = tf.unique(groups)
    elements = tf.math.unsorted_segment_sum(tf.constant(sizes, tf.int64), place, tf.size(unique))
    of_group = tf.math.unsorted_segment_max(chunk_sizes, place, tf.size(unique))
    chunks = -(-elements // of_group)
    has_scale = tf.logical_and(of_group > 1, chunks > 0)
    is_coded = tf.repeat(has_scale, chunks)
    counts = tf.boolean_mask(chunks, has_scale)
    return Layout(
        _places(tf.logical_not(is_coded)),
        _places(is_coded),
        tf.repeat(tf.range(tf.size(counts)), counts),
        counts,
    )


def sum_in_few_bits(
    chunked: ops.Chunked,
    inputs: ExchangeInputs,
    layout: Layout,
    offsets: tf.Tensor,
    own_finite: tf.Tensor,
    leader: tf.Tensor,
    bits: int,
    filter: float,
    fingerprint: int,
) -> Generator[Wish, tf.Tensor, tuple[list[tf.Tensor], tf.Tensor]]:
    """Broadcasts the leader's offsets, and sums the entries there.

    Args:
        chunked: This replica's tensors.
        inputs: Its side of the step.
        layout: Of the chunks.
        offsets: What this replica chose, if it leads.
        own_finite: bool scalar, whether its gradients are finite.
        leader: int32 scalar, the rank of the replica that leads.
        bits: 16, 8, 4 or 1.
        filter: The share of the residual's filter.
        fingerprint: Of the method and its tensors.

    Returns:
        The reduced gradients, and whether they are finite.
    """
    words = offsets
    if bits == SUMMED_BITS:
        own = tf.gather(ops.chunk_take(chunked, offsets, own_finite), layout.coded)
        words = tf.concat([offsets, tf.bitcast(_largest(own, layout), tf.int32)], 0)
    words = yield from unless_empty(words, lambda payload: Broadcast(payload, leader))
    offsets, scales = words[: tf.size(offsets)], words[tf.size(offsets) :]
    taken = ops.chunk_take(chunked, offsets, own_finite)
    whole = yield from unless_empty(tf.gather(taken, layout.whole), AllReduce)
    # What is not finite has no level: zeros are sent, beside a flag.
    values = tf.where(own_finite, tf.gather(taken, layout.coded), 0.0)
    if bits == SUMMED_BITS:
        of_each = tf.gather(tf.bitcast(scales, tf.float32), layout.scale_of)
        coded = yield from _sum_levels(values, of_each, own_finite, inputs.size)
    else:
        header = {"settings": chunked.chunk_sizes, "fingerprint": fingerprint}
        coded = yield from _gather_codes(values, layout, own_finite, inputs.step, bits, header)
    totals = tf.concat([_joined(layout, whole, coded.total), [0.0]], 0)
    rests = _joined(layout, tf.zeros_like(whole), values - coded.sent)
    finite = tf.logical_and(coded.finite, inputs.finite)
    return ops.chunk_apply(
        chunked, offsets, totals, own_finite, finite, rests=rests, filter=filter
    )


class _Summed(NamedTuple):
    sent: tf.Tensor  # what this replica sent, as float32
    total: tf.Tensor  # what all did
    finite: tf.Tensor  # whether all are


def _sum_levels(
    values: tf.Tensor, scales: tf.Tensor, own_finite: tf.Tensor, size: int
) -> Generator[AllReduce, tf.Tensor, _Summed]:
    """Sums levels of common scales, one for each value, in float16.

    The levels of all replicas are at most 2048 in sum, so no sum of some of them is rounded, in
    whatever order they are added.
    """
    if size > _LARGEST_EXACT:
        raise ValueError(
            f"ScaleCom: value_bits={SUMMED_BITS} is for up to {_LARGEST_EXACT} replicas; there are "
            f"{size}. Use value_bits={FLOAT_BITS}."
        )
    most = 2 ** ((_LARGEST_EXACT // size).bit_length() - 1)
    levels = _levels(values, scales, most)
    flag = tf.where(own_finite, 0.0, float("nan"))
    given = tf.cast(tf.concat([levels, flag[tf.newaxis]], 0), tf.float16)
    total = tf.cast((yield AllReduce(given)), tf.float32)
    return _Summed(
        _value(levels, scales, most),
        _value(total[:-1], scales, most),
        tf.math.is_finite(total[-1]),
    )


def _gather_codes(
    values: tf.Tensor,
    layout: Layout,
    own_finite: tf.Tensor,
    step: tf.Tensor,
    bits: int,
    header: dict[str, Any],
) -> Generator[AllGather, tf.Tensor, _Summed]:
    """Gathers codes of a few bits, behind this replica's own scales."""
    most = max(1, 2 ** (bits - 1) - 1)
    if bits == 1:
        scales = _mean(values, layout)
        levels = tf.where(values < 0, -1.0, 1.0)
        codes = tf.cast(values < 0, tf.int32)
    else:
        scales = _largest(values, layout)
        levels = _levels(values, tf.gather(scales, layout.scale_of), most)
        codes = tf.cast(levels, tf.int32) + 2 ** (bits - 1)
    body = tf.concat([tf.bitcast(scales, tf.int32), _packed(codes, bits)], 0)
    payload = ops.payload_write(body, step, own_finite, method=SCALECOM, **header)
    payloads = yield AllGather(payload, same_length=True)
    bodies, finite = ops.payload_read(payloads, step, method=SCALECOM, **header)
    of_all = tf.bitcast(bodies[:, : tf.size(scales)], tf.float32)
    codes = _unpacked(bodies[:, tf.size(scales) :], bits, tf.size(codes))
    levels_of_all = 1 - 2 * codes if bits == 1 else codes - 2 ** (bits - 1)
    received = _value(
        tf.cast(levels_of_all, tf.float32), tf.gather(of_all, layout.scale_of, axis=1), most
    )
    return _Summed(
        _value(levels, tf.gather(scales, layout.scale_of), most),
        tf.cumsum(received, 0)[-1],  # in the order of the replicas, as a reduction need not be
        finite,
    )


def _levels(values: tf.Tensor, scales: tf.Tensor, most: int) -> tf.Tensor:
    """The nearest of the whole numbers up to `most`, which stands for the scale."""
    shares = tf.clip_by_value(tf.math.divide_no_nan(values, scales), -1.0, 1.0)
    return tf.round(shares * most)


def _value(levels: tf.Tensor, scales: tf.Tensor, most: int) -> tf.Tensor:
    """What levels stand for; the level `most` exactly for the scale."""
    return scales * (levels * (1 / most))


def _largest(values: tf.Tensor, layout: Layout) -> tf.Tensor:
    """The largest magnitude of the values of each scale."""
    counts = layout.counts
    largest = tf.math.unsorted_segment_max(tf.abs(values), layout.scale_of, tf.size(counts))
    return tf.ensure_shape(largest, counts.shape)


def _mean(values: tf.Tensor, layout: Layout) -> tf.Tensor:
    """The mean magnitude of the values of each scale, summed in float64."""
    counts = layout.counts
    magnitudes = tf.cast(tf.abs(values), tf.float64)
    sums = tf.math.unsorted_segment_sum(magnitudes, layout.scale_of, tf.size(counts))
    return tf.ensure_shape(tf.cast(sums / tf.cast(counts, tf.float64), tf.float32), counts.shape)


def _packed(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """Codes in whole words, the first in the lowest bits; int32 [words]."""
    per_word = _WORD_BITS // bits
    padded = tf.pad(codes, [[0, -tf.size(codes) % per_word]])
    shifted = tf.bitwise.left_shift(tf.reshape(padded, [-1, per_word]), _shifts(bits))
    return tf.reduce_sum(shifted, 1)


def _unpacked(words: tf.Tensor, bits: int, count: tf.Tensor) -> tf.Tensor:
    """The codes in rows of words; int32 [rows, count]."""
    shifted = tf.bitwise.right_shift(words[:, :, tf.newaxis], _shifts(bits))
    codes = tf.bitwise.bitwise_and(shifted, 2**bits - 1)
    return tf.reshape(codes, [tf.shape(words)[0], tf.size(words[0]) * (_WORD_BITS // bits)])[
        :, :count
    ]


def _shifts(bits: int) -> tf.Tensor:
    return tf.range(0, _WORD_BITS, bits)


def _places(mask: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.where(mask)[:, 0], tf.int32)


def _joined(layout: Layout, whole: tf.Tensor, coded: tf.Tensor) -> tf.Tensor:
    """The values of all chunks, in their order."""
    return tf.dynamic_stitch([layout.whole, layout.coded], [whole, coded])
