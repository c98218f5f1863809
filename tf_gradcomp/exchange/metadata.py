"""Riders: a few numbers that travel with the first collective of a step.

There are two kinds. The rows of a table that each replica touched; and a tag, by which replicas
find out that they do not add up the same things. Gathered payloads need no tag, because their
header tells the same.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.digests import MIXING, digest

_EXACT_BITS = {tf.float32: 24, tf.float16: 11, tf.bfloat16: 8}  # whole numbers up to 2^bits
_TAG_BITS = 22
DIFFERENT = (
    "Replicas of this job add up different things: they are at different steps, or exchange "
    "the gradients of different variables, or compress them by different settings. Start all "
    "workers with the same program, and let all restore the same checkpoint."
)


def rows_as_words(touched: tf.Tensor) -> tf.Tensor:
    """Packs bits into int32 words, to be gathered.

    Args:
        touched: bool [rows].
    """
    rows = touched.shape.num_elements()
    bits = tf.reshape(tf.pad(tf.cast(touched, tf.int32), [[0, -rows % 32]]), [-1, 32])
    return tf.reduce_sum(tf.bitwise.left_shift(bits, tf.range(32)), 1)


def rows_from_words(words: tf.Tensor, rows: int) -> tf.Tensor:
    """Which rows any replica touched: bool [rows].

    Args:
        words: int32 [replicas, words], what all replicas gave.
        rows: The number of rows.
    """
    bits = tf.bitwise.right_shift(words[:, :, tf.newaxis], tf.range(32))
    any_of_them = tf.reduce_any(tf.equal(tf.bitwise.bitwise_and(bits, 1), 1), 0)
    return tf.ensure_shape(tf.reshape(any_of_them, [-1])[:rows], [rows])


def rows_as_numbers(touched: tf.Tensor, dtype: tf.DType, replicas: int) -> tf.Tensor:
    """Rows as digits of floats, to be summed: no sum of digits overflows into the next.

    Args:
        touched: bool [rows].
        dtype: The dtype of the floats.
        replicas: The number of replicas, whose numbers are summed.
    """
    rows, digits = touched.shape.num_elements(), _digits(dtype, replicas)
    ones = tf.reshape(tf.pad(tf.cast(touched, tf.float32), [[0, -rows % digits]]), [-1, digits])
    return tf.cast(tf.reduce_sum(ones * _places(digits, replicas), 1), dtype)


def rows_from_numbers(total: tf.Tensor, rows: int, replicas: int) -> tf.Tensor:
    """Which rows any replica touched: bool [rows].

    Args:
        total: [numbers], the sum of what all replicas gave.
        rows: The number of rows.
        replicas: The number of replicas, whose numbers were summed.
    """
    digits = _digits(total.dtype, replicas)
    if digits == 1:  # perhaps not exact, but never rounded to zero
        return tf.ensure_shape(total[:rows] > 0, [rows])
    places = tf.cast(_places(digits, replicas), tf.int32)
    counts = tf.cast(total, tf.int32)[:, tf.newaxis] // places % (replicas + 1)
    return tf.ensure_shape(tf.reshape(counts > 0, [-1])[:rows], [rows])


def tag(
    fingerprint: int,
    step: tf.Tensor,
    dtype: tf.DType,
    replicas: int,
    settings: tf.Tensor | None = None,
) -> tf.Tensor:
    """Whole numbers that differ where replicas differ in what they exchange or in their step.

    Args:
        fingerprint: 64 bits, computed from all that must be equal on all replicas and is the same
            in all steps.
        step: int64 scalar.
        dtype: The float dtype of the numbers.
        replicas: The number of replicas, whose tags are summed. The sum must be exact; if there are
            too many replicas for that in 16-bit floats, the tag is empty.
        settings: int64 [tensors], the main settings in this step, of a method that has any.
    """
    base = 2 ** _EXACT_BITS[dtype] // replicas
    if base < 2:
        return tf.zeros([0], dtype)
    number = tf.cast(tag_word(fingerprint, step, settings), tf.int64)
    count = math.ceil(_TAG_BITS / math.log2(base))
    places = tf.constant([base**i for i in range(count)], tf.int64)
    return tf.cast(number // places % base, dtype)


def tag_word(fingerprint: int, step: tf.Tensor, settings: tf.Tensor | None = None) -> tf.Tensor:
    """One number that differs likewise: int32 scalar, to be gathered."""
    facts = tf.cast(step, tf.int64) ^ tf.constant(fingerprint, tf.int64)
    if settings is not None:
        facts ^= digest(settings)
    mixed = facts * MIXING
    bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(mixed, 41), 2**_TAG_BITS - 1)
    return tf.cast(bits, tf.int32)


def checked(answer: tf.Tensor, tags: tf.Tensor, expected: tf.Tensor) -> tf.Tensor:
    """The answer of a collective, if the tags that travelled with it are those expected.

    Raises:
        tf.errors.InvalidArgumentError: In the step, if the replicas did not all give the same tag.
    """
    tags, expected = tf.cast(tags, tf.float32), tf.cast(expected, tf.float32)  # exact: 22 bits
    return ops.pass_if_equal(answer, tags, expected, DIFFERENT)


def _digits(dtype: tf.DType, replicas: int) -> int:
    return max(1, math.floor(_EXACT_BITS[dtype] / math.log2(replicas + 1) + 1e-9))


def _places(digits: int, replicas: int) -> tf.Tensor:
    return tf.constant([float((replicas + 1) ** i) for i in range(digits)], tf.float32)
