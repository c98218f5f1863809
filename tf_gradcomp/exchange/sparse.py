"""Gradients that come as `tf.IndexedSlices`, some rows of a table, and return as slices."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import tensorflow as tf

from tf_gradcomp.compressors.base import Compressor
from tf_gradcomp.compressors.requests import AllGather, AllReduce
from tf_gradcomp.groups.metadata import checked
from tf_gradcomp.groups.slices import sum_of_slices
from tf_gradcomp.policy import GradientSpec


def dense(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """The gradient of a whole table as a dense tensor; zeros in rows that slices do not have.

    Slices become float32, because sums of many slices of one row may need more than 16 bits.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    values = tf.cast(gradient.values, tf.float32)
    return tf.math.unsorted_segment_sum(values, gradient.indices, gradient.dense_shape[0])


def touched_rows(slices: tf.IndexedSlices, rows: int) -> tf.Tensor:
    """Returns which rows of a table the slices have: bool [rows]."""
    indices = tf.cast(slices.indices, tf.int64)[:, tf.newaxis]
    counts = tf.scatter_nd(indices, tf.ones_like(slices.indices, tf.int32), [rows])
    return counts > 0


def like_gradient(
    gradient: tf.Tensor | tf.IndexedSlices, total: tf.Tensor, touched: tf.Tensor | None
) -> tf.Tensor | tf.IndexedSlices:
    """Returns a reduced gradient in the dtype and the form of this replica's gradient.

    Slices get the rows that any replica touched or sent values for.
    """
    if not isinstance(gradient, tf.IndexedSlices) or touched is None:
        return tf.cast(total, gradient.dtype)
    sent = tf.reduce_any(tf.reshape(total, [touched.shape[0], -1]) != 0, 1)
    indices = tf.where(tf.logical_or(touched, sent))[:, 0]
    values = tf.cast(tf.gather(total, indices), gradient.values.dtype)
    return tf.IndexedSlices(values, tf.cast(indices, gradient.indices.dtype), gradient.dense_shape)


def is_large(spec: GradientSpec, max_dense_elements: int) -> bool:
    """Whether a table is too large for its slices to be made dense."""
    return spec.elements > max_dense_elements


def check_rows(specs: Sequence[GradientSpec]) -> None:
    """Raises a ValueError for a table with more rows than an exchanged index can number."""
    for spec in specs:
        if spec.shape and spec.shape[0] > tf.int32.max:
            raise ValueError(
                f"CompressedOptimizer: {spec.path} has {spec.shape[0]} rows, and slices travel "
                f"with int32 indices: at most {tf.int32.max}. Split the table."
            )


def stays_sparse(
    gradient: tf.Tensor | tf.IndexedSlices,
    spec: GradientSpec,
    compressor: Compressor,
    max_dense_elements: int,
) -> bool:
    """Whether a gradient is summed as slices, without the method."""
    if not isinstance(gradient, tf.IndexedSlices):
        return False
    return compressor.slices_dtype is not None or is_large(spec, max_dense_elements)


def sum_slices(
    slices: Sequence[tf.IndexedSlices], replicas: int, tag: tf.Tensor, dtype: tf.DType
) -> Generator[AllGather, tf.Tensor, tuple[list[tf.IndexedSlices], tf.Tensor]]:
    """Sums the slices of all replicas: gathers them, and adds up those of equal lookups.

    Args:
        slices: One for each table.
        replicas: The number of replicas.
        tag: int32 scalar, which must be equal on all replicas.
        dtype: The dtype in which values travel: float32, float16 or bfloat16.

    Returns:
        For each table the slices of all replicas; and int64 [tables], the bytes of each table in
        this replica's payload.

    Raises:
        tf.errors.InvalidArgumentError: If the tags differ.
    """
    lengths = tf.stack([tf.size(table.indices) for table in slices])
    indices = [tf.cast(table.indices, tf.int32) for table in slices]
    values = [tf.reshape(tf.cast(table.values, dtype), [-1]) for table in slices]
    words = [tag[tf.newaxis], lengths, *indices, _as_words(tf.concat(values, 0))]
    rows = yield AllGather(tf.concat(words, 0))
    rows = checked(rows[:, 1:], rows[:, 0], tf.fill([replicas], tag))
    tables_by_replica = [_unpacked(rows[replica], slices, dtype) for replica in range(replicas)]
    sums = [
        sum_of_slices(parts, local)
        for parts, local in zip(zip(*tables_by_replica, strict=True), slices, strict=True)
    ]
    tensor_bytes = [
        4 * tf.size(table.indices, tf.int64) + dtype.size * tf.size(table.values, tf.int64)
        for table in slices
    ]
    return sums, tf.stack(tensor_bytes)


def _as_words(values: tf.Tensor) -> tf.Tensor:
    """The bits of numbers as int32: two 16-bit numbers in one word, padded with a zero."""
    if values.dtype.size == 4:
        return tf.bitcast(values, tf.int32)
    even = tf.pad(values, [[0, tf.size(values) % 2]])
    return tf.bitcast(tf.reshape(even, [-1, 2]), tf.int32)


def _unpacked(
    words: tf.Tensor, like: Sequence[tf.IndexedSlices], dtype: tf.DType
) -> list[tf.IndexedSlices]:
    lengths = tf.unstack(words[: len(like)], len(like))
    start = len(like)
    indices, slices = [], []
    for table, length in zip(like, lengths, strict=True):
        indices.append(tf.cast(words[start : start + length], table.indices.dtype))
        start += length
    entries = tf.reshape(tf.bitcast(words[start:], dtype), [-1])
    start = tf.constant(0)
    for table, table_indices, length in zip(like, indices, lengths, strict=True):
        shape = [length, *table.values.shape[1:]]
        size = tf.reduce_prod(shape)
        values = tf.reshape(entries[start : start + size], shape)
        start += size
        slices.append(
            tf.IndexedSlices(tf.cast(values, table.values.dtype), table_indices, table.dense_shape)
        )
    return slices


def prefer_dense(
    slices: tf.IndexedSlices, rows: int, replicas: int, tag: tf.Tensor
) -> Generator[AllReduce, tf.Tensor, tf.Tensor]:
    """Whether summing a whole table sends less than gathering its slices.

    Summing sends less if slices cover most of the table, as for an embedding that is also the
    output layer. A ring forwards each replica's slices to all other replicas, but sends a table
    only twice. The result is a bool scalar, equal on all replicas.

    Args:
        slices: The slices of this replica.
        rows: The number of rows of the table.
        replicas: The number of replicas.
        tag: float32, of `metadata.tag`: `sum_whole` follows, and has no tag of its own.

    Raises:
        tf.errors.InvalidArgumentError: If the tags differ.
    """
    many = replicas * tf.size(slices.indices, tf.int64) > 2 * rows
    total = yield AllReduce(tf.cast(many, tf.float32)[tf.newaxis], tag)
    return checked(total[:1], total[1:], replicas * tag)[0] > 0


def sum_whole(
    slices: tf.IndexedSlices, dtype: tf.DType
) -> Generator[AllReduce, tf.Tensor, tuple[list[tf.IndexedSlices], tf.Tensor]]:
    """Sums a whole table in the smaller of `dtype` and its own dtype; returns as `sum_slices`."""
    smaller = min(slices.values.dtype, dtype, key=lambda value_dtype: value_dtype.size)
    table = tf.cast(dense(slices), smaller)
    total = yield AllReduce(tf.reshape(table, [-1]))
    rows = tf.range(tf.shape(table, tf.int64)[0])
    values = tf.cast(tf.reshape(total, tf.shape(table)), slices.values.dtype)
    indices = tf.cast(rows, slices.indices.dtype)
    total_slices = tf.IndexedSlices(values, indices, slices.dense_shape)
    return [total_slices], tf.size(total, tf.int64)[tf.newaxis] * table.dtype.size
