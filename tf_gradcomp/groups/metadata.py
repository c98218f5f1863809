"""Metadata: a few numbers that travel with the first gather or sum of a step.

There are two kinds. Flags are bits: every replica learns whether any replica has set a bit, such as
the bit of a table's row with a gradient. A tag detects replicas that would sum different vectors.
Gathered payloads need no tag, because their header serves the same purpose.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import MIXING, digest
from tf_gradcomp.compressors.requests import AllGather, AllReduce, Broadcast, Request

# Whole numbers up to 2^bits are exact. Metadata of int64 sums are computed as float32.
_EXACT_BITS = {tf.float32: 24, tf.float16: 11, tf.bfloat16: 8, tf.int64: 24}
_TAG_BITS = 22
DIFFERENT = (
    "The replicas of this job sum different vectors: they are at different steps, exchange "
    "gradients of different variables, or compress with different settings. Start all workers "
    "with the same program, and restore the same checkpoint on all workers. If they are equal, "
    "this is a fault of tf_gradcomp: please report it."
)


class Metadata:
    """The metadata of one replica in one step.

    Args:
        flags: bool [n], of this replica.
        replicas: The number of replicas.
        new_tag: Returns the tag of this step for the dtype of a sum, as `tag` does.

    Attributes:
        flags: bool [n], of this replica; after the first gather or sum, the flags that any replica
            has set.
    """

    def __init__(
        self, flags: tf.Tensor, replicas: int, new_tag: Callable[[tf.DType], tf.Tensor]
    ) -> None:
        self.flags = flags
        self._replicas, self._new_tag = replicas, new_tag
        self._is_sent = False
        self._read: Callable[[tf.Tensor], tf.Tensor] | None = None  # reads the next answer

    def attach(self, request: Request) -> Request:
        """Returns a request of the step; the first gather or sum gets the metadata."""
        if isinstance(request, AllReduce) and request.metadata is not None:
            raise ValueError("AllReduce.metadata must be None; the exchange adds it.")
        has_flags = self.flags.shape.num_elements() > 0
        if self._is_sent or isinstance(request, Broadcast):
            return request
        if isinstance(request, AllReduce):
            self._is_sent = True
            return self._attach_to_sum(request)
        if not has_flags:  # the header of a payload has the step and the fingerprint
            return request
        self._is_sent = True
        words = flags_as_words(self.flags)
        self._read = functools.partial(self._read_rows, words.shape.num_elements())
        return AllGather(tf.concat([words, request.payload], 0), request.same_length)

    def detach(self, answer: tf.Tensor) -> tf.Tensor:
        """Returns the answer to a request without metadata, after checking the tag.

        Raises:
            tf.errors.InvalidArgumentError: In the step, if the replicas do not all have the same
                tag.
        """
        read, self._read = self._read, None
        return read(answer) if read else answer

    def _attach_to_sum(self, request: AllReduce) -> AllReduce:
        dtype = request.values.dtype
        tag, digits = self._new_tag(dtype), flags_as_numbers(self.flags, dtype, self._replicas)
        added = tf.concat([tag, digits], 0)
        self._read = functools.partial(self._read_sum, tag, added.shape.num_elements())
        return AllReduce(request.values, added)

    def _read_rows(self, length: int, rows: tf.Tensor) -> tf.Tensor:
        self.flags = flags_from_words(rows[:, :length], self.flags.shape.num_elements())
        return rows[:, length:]

    def _read_sum(self, tag: tf.Tensor, length: int, total: tf.Tensor) -> tf.Tensor:
        answer, added = (total[:-length], total[-length:]) if length else (total, total[:0])
        tags = tag.shape.num_elements()
        answer = checked(answer, added[:tags], tf.cast(tag, tf.float32) * self._replicas)
        count = self.flags.shape.num_elements()
        self.flags = flags_from_numbers(added[tags:], count, self._replicas)
        return answer


def flags_as_words(flags: tf.Tensor) -> tf.Tensor:
    """Packs bits into int32 words, to be gathered."""
    missing = -flags.shape.num_elements() % 32
    bits = tf.reshape(tf.pad(tf.cast(flags, tf.int32), [[0, missing]]), [-1, 32])
    return tf.reduce_sum(tf.bitwise.left_shift(bits, tf.range(32)), 1)


def flags_from_words(words: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the logical or of all replicas' `count` flags, from their words."""
    bits = tf.bitwise.right_shift(words[:, :, tf.newaxis], tf.range(32))
    any_of_them = tf.reduce_any(tf.equal(tf.bitwise.bitwise_and(bits, 1), 1), 0)
    return tf.ensure_shape(tf.reshape(any_of_them, [-1])[:count], [count])


def flags_as_numbers(flags: tf.Tensor, dtype: tf.DType, replicas: int) -> tf.Tensor:
    """Packs flags as digits into floats to be summed: no sum of digits overflows into the next."""
    digits = _digits(dtype, replicas)
    missing = -flags.shape.num_elements() % digits
    digits_set = tf.reshape(tf.pad(tf.cast(flags, tf.float32), [[0, missing]]), [-1, digits])
    return tf.cast(tf.reduce_sum(digits_set * _place_values(digits, replicas), 1), dtype)


def flags_from_numbers(total: tf.Tensor, count: int, replicas: int) -> tf.Tensor:
    """Returns the logical or of all replicas' `count` flags, from the sum over the replicas."""
    digits = _digits(total.dtype, replicas)
    if digits == 1:  # perhaps not exact, but never rounded to zero
        return tf.ensure_shape(total[:count] > 0, [count])
    place_values = tf.cast(_place_values(digits, replicas), tf.int32)
    counts = tf.cast(total, tf.int32)[:, tf.newaxis] // place_values % (replicas + 1)
    return tf.ensure_shape(tf.reshape(counts > 0, [-1])[:count], [count])


def tag(
    fingerprint: int,
    step: tf.Tensor,
    dtype: tf.DType,
    replicas: int,
    settings: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns numbers that differ if replicas differ in their step or in their gradients.

    Args:
        fingerprint: 64 bits, computed from all facts that must be equal on all replicas and do not
            change between steps.
        step: int64 scalar.
        dtype: The float dtype of the numbers.
        replicas: The number of replicas, whose tags are summed. The sum must be exact; if there are
            too many replicas for an exact sum in 16-bit floats, the tag is empty.
        settings: int64 [tensors], the main settings in this step, if the method has settings.
    """
    base = 2 ** _EXACT_BITS[dtype] // replicas
    if base < 2:
        return tf.zeros([0], dtype)
    word = tf.cast(tag_word(fingerprint, step, settings), tf.int64)
    count = math.ceil(_TAG_BITS / math.log2(base))
    place_values = tf.constant([base**i for i in range(count)], tf.int64)
    return tf.cast(word // place_values % base, dtype)


def tag_word(fingerprint: int, step: tf.Tensor, settings: tf.Tensor | None = None) -> tf.Tensor:
    """Returns one number that differs in the same cases: int32 scalar, to be gathered."""
    facts = tf.cast(step, tf.int64) ^ tf.constant(fingerprint, tf.int64)
    if settings is not None:
        facts ^= digest(settings)
    mixed = facts * MIXING
    bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(mixed, 41), 2**_TAG_BITS - 1)
    return tf.cast(bits, tf.int32)


def checked(answer: tf.Tensor, tags: tf.Tensor, expected: tf.Tensor) -> tf.Tensor:
    """Returns the answer of a collective, if the tags that travelled with it are as expected."""
    tags, expected = tf.cast(tags, tf.float32), tf.cast(expected, tf.float32)  # exact: 22 bits
    return ops.pass_if_equal(answer, tags, expected, DIFFERENT)


def _digits(dtype: tf.DType, replicas: int) -> int:
    return max(1, math.floor(_EXACT_BITS[dtype] / math.log2(replicas + 1) + 1e-9))


def _place_values(digits: int, replicas: int) -> tf.Tensor:
    return tf.constant([float((replicas + 1) ** i) for i in range(digits)], tf.float32)
