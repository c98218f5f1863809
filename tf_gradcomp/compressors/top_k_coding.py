"""Short payloads of TopK: places within chunks, and values of few bits.

A short payload is made from the payload that `ops.top_k_encode` writes, and is expanded again
before it is decoded. The ops therefore still select, check and sum. docs/payload_format.md has the
layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import FLOAT_BITS
from tf_gradcomp.compressors.value_bits import decode_values, encode_values
from tf_gradcomp.ops.payload import TOP_K, Settings, each_finite, tensor_of

VALUE_BITS = (FLOAT_BITS, 16, 8, 4, 2, 1)
_WORD_BITS = 32
Number = TypeVar("Number", int, tf.Tensor)


@dataclasses.dataclass(frozen=True)
class Coding:
    """The format of entries.

    Attributes:
        chunk: The elements of a chunk, a power of two; None if indices are whole words.
        value_bits: The bits of a value.
    """

    chunk: int | None
    value_bits: int

    @property
    def is_plain(self) -> bool:
        """Whether this is the format that the ops write."""
        return self.chunk is None and self.value_bits == FLOAT_BITS

    @property
    def index_bits(self) -> int:
        """The bits of an index."""
        return _WORD_BITS if self.chunk is None else self.chunk.bit_length() - 1

    @property
    def scales(self) -> int:
        """The number of scales of a tensor."""
        return {FLOAT_BITS: 0, 2: 2}.get(self.value_bits, 1)

    def chunks(self, elements: Number) -> Number:
        """The number of chunks of a tensor."""
        return 0 * elements if self.chunk is None else -(-elements // self.chunk)

    def tensor_bits(self, elements: Number, entries: Number) -> Number:
        """The bits of a tensor with a number of sent entries."""
        count_bits = self.chunks(elements) * (self.chunk or 0).bit_length()
        entry_bits = entries * (self.index_bits + self.value_bits)
        return count_bits + entry_bits + FLOAT_BITS * self.scales


class _Entries(NamedTuple):
    """The entries of all tensors in order, and the words of tensors that are sent whole.

    Attributes:
        indices: int32 [..., entries], unsigned positions in the flattened tensor.
        values: float32 [..., entries].
        whole: int32 [..., words].
    """

    indices: tf.Tensor
    values: tf.Tensor
    whole: tf.Tensor


class ShortPayloads:
    """Encodes and decodes the short payloads of one step.

    Args:
        coding: The format of entries.
        sizes: The number of elements of each tensor.
        entries: The number of sent entries of each tensor; 0 if it is sent whole.
        step: int64 scalar.
        fingerprint: Of the method and its tensors.
    """

    def __init__(
        self,
        coding: Coding,
        sizes: Sequence[int],
        entries: Settings,
        step: tf.Tensor,
        fingerprint: int,
    ) -> None:
        self._coding, self._step = coding, step
        self._layout: dict[str, Any] = {"entries": entries, "fingerprint": fingerprint}
        self._header: dict[str, Any] = {
            "settings": entries,
            "method": TOP_K,
            "fingerprint": fingerprint,
        }
        self._sizes = tf.constant(sizes, tf.int64)
        self._tensor_entries = tf.minimum(tensor_of(entries), self._sizes)
        self._is_whole = tf.equal(self._tensor_entries, 0)  # also of tensors without elements
        self._whole_sizes = tf.where(self._is_whole, self._sizes, 0)
        self._entry_tensor, rank = _runs(self._tensor_entries)
        words = self._whole_sizes + 2 * self._tensor_entries
        starts = tf.cumsum(words, exclusive=True)
        self._at_indices = tf.cast(tf.gather(starts, self._entry_tensor) + rank, tf.int32)
        tensor_entries = tf.cast(tf.gather(self._tensor_entries, self._entry_tensor), tf.int32)
        self._at_values = self._at_indices + tensor_entries
        tensor_of_whole, rank = _runs(self._whole_sizes)
        self._at_whole = tf.cast(tf.gather(starts, tensor_of_whole) + rank, tf.int32)
        coded = tf.cast(tf.logical_not(self._is_whole), tf.int32)
        self._entry_scale = tf.gather(tf.cumsum(coded, exclusive=True), self._entry_tensor)
        self._counts = tf.boolean_mask(self._tensor_entries, tf.logical_not(self._is_whole))
        self._chunks = tf.where(self._is_whole, tf.zeros_like(words), coding.chunks(self._sizes))
        first = tf.cumsum(self._chunks, exclusive=True)
        self._first_chunk = tf.gather(first, self._entry_tensor)

    def encode(
        self, residuals: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor], step: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Encodes like `ops.top_k_encode`; rounding errors stay in the residuals."""
        plain, _ = ops.top_k_encode(residuals, gradients, step, **self._layout)
        bodies, finite, _ = ops.payload_read(plain[tf.newaxis], step, **self._header)
        entries = self._split_body(bodies[0])
        scales, codes, sent = self._coded(entries.values)
        counts, indices = self._in_chunks(entries.indices)
        body = tf.concat([scales, counts, indices, codes, entries.whole], 0)
        payload = ops.payload_write(body, step, finite, **self._header)
        if self._coding.value_bits != FLOAT_BITS:
            rests = _Entries(entries.indices, entries.values - sent, tf.zeros_like(entries.whole))
            residual_payload = ops.payload_write(
                self._join_body(rests), step, finite, **self._header
            )
            ops.top_k_put_back(residuals, residual_payload, **self._layout)
        return payload, self._tensor_bytes()

    def decode(
        self, payloads: tf.Tensor, step: tf.Tensor, *, shapes: Sequence[Any]
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Decodes like `ops.top_k_decode`."""
        bodies, *_ = ops.payload_read(payloads, step, **self._header)
        plain = tf.map_fn(
            tf.autograph.experimental.do_not_convert(lambda row: self._plain(*row)),
            (bodies, each_finite(payloads)),
            fn_output_signature=tf.int32,
        )
        return ops.top_k_decode(plain, step, shapes=shapes, **self._layout)

    def put_back(self, residuals: Sequence[tf.Tensor], payload: tf.Tensor) -> Any:
        """Restores entries like `ops.top_k_put_back`."""
        return ops.top_k_put_back(residuals, self.as_plain(payload), **self._layout)

    def as_plain(self, payload: tf.Tensor) -> tf.Tensor:
        """Returns a short payload as `ops.top_k_encode` would have written its entries."""
        bodies, finite, _ = ops.payload_read(payload[tf.newaxis], self._step, **self._header)
        return self._plain(bodies[0], finite)

    def _plain(self, body: tf.Tensor, finite: tf.Tensor) -> tf.Tensor:
        count, chunks = tf.size(self._entry_tensor), tf.cast(tf.reduce_sum(self._chunks), tf.int32)
        count_bits = (self._coding.chunk or 0).bit_length()
        sections = [
            self._coding.scales * tf.size(self._counts),
            words_of(chunks, count_bits),
            words_of(count, self._coding.index_bits),
            words_of(count, self._coding.value_bits),
            tf.size(self._at_whole),
        ]
        scales, counts, indices, codes, whole = tf.split(body, sections)
        if self._coding.chunk is not None:
            counts = tf.cast(unpack_codes(counts, count_bits, chunks), tf.int64)
            indices = self._out_of_chunks(
                counts, unpack_codes(indices, self._coding.index_bits, count)
            )
        values = self._decoded(scales, codes)
        plain = self._join_body(_Entries(indices, values, whole))
        return ops.payload_write(plain, self._step, finite, **self._header)

    def _split_body(self, body: tf.Tensor) -> _Entries:
        words = (tf.gather(body, at) for at in (self._at_indices, self._at_values))
        indices, values = words
        return _Entries(indices, tf.bitcast(values, tf.float32), tf.gather(body, self._at_whole))

    def _join_body(self, entries: _Entries) -> tf.Tensor:
        at = [self._at_indices, self._at_values, self._at_whole]
        return tf.dynamic_stitch(
            at, [entries.indices, tf.bitcast(entries.values, tf.int32), entries.whole]
        )

    def _coded(self, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the words of scales and of codes, and the values that they encode."""
        bits = self._coding.value_bits
        if bits == FLOAT_BITS:
            return tf.zeros([0], tf.int32), tf.bitcast(values, tf.int32), values
        scales, codes = encode_values(values, self._entry_scale, self._counts, bits)
        sent = decode_values(scales[tf.newaxis], codes[tf.newaxis], self._entry_scale, bits)[0]
        return tf.bitcast(scales, tf.int32), pack_codes(codes, bits), sent

    def _decoded(self, scales: tf.Tensor, codes: tf.Tensor) -> tf.Tensor:
        bits = self._coding.value_bits
        if bits == FLOAT_BITS:
            return tf.bitcast(codes, tf.float32)
        codes = unpack_codes(codes, bits, tf.size(self._entry_tensor))
        scales = tf.bitcast(scales, tf.float32)
        return decode_values(scales[tf.newaxis], codes[tf.newaxis], self._entry_scale, bits)[0]

    def _in_chunks(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the words with the number of entries in each chunk, and with places in chunks."""
        chunk = self._coding.chunk
        if chunk is None:
            return tf.zeros([0], tf.int32), indices
        unsigned = tf.cast(tf.bitcast(indices, tf.uint32), tf.int64)
        chunk_of = self._first_chunk + unsigned // chunk
        count = tf.reduce_sum(self._chunks)
        counts = tf.math.unsorted_segment_sum(tf.ones_like(indices), chunk_of, count)
        offsets = tf.cast(unsigned % chunk, tf.int32)
        return pack_codes(counts, chunk.bit_length()), pack_codes(offsets, self._coding.index_bits)

    def _out_of_chunks(self, counts: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
        """Returns positions in the tensors; arbitrary numbers if the counts are malformed."""
        rank = tf.range(tf.size(offsets, tf.int64), dtype=tf.int64)
        chunk_of = tf.searchsorted(tf.cumsum(counts), rank, "right", tf.int64)
        indices = (chunk_of - self._first_chunk) * (self._coding.chunk or 0) + tf.cast(
            offsets, tf.int64
        )
        return tf.bitcast(tf.cast(indices, tf.uint32), tf.int32)

    def _tensor_bytes(self) -> tf.Tensor:
        bits = self._coding.tensor_bits(self._sizes, self._tensor_entries)
        return tf.where(self._is_whole, 4 * self._sizes, bits // 8)


def _runs(lengths: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns for each member of runs with these lengths its run, and its position in the run."""
    run = tf.repeat(tf.range(tf.size(lengths, tf.int64), dtype=tf.int64), lengths)
    first = tf.gather(tf.cumsum(lengths, exclusive=True), run)
    return run, tf.range(tf.size(run, tf.int64), dtype=tf.int64) - first


def words_of(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """Returns the number of words for a number of codes, without an overflow of int32 bits."""
    groups, left_over = codes // _WORD_BITS, codes % _WORD_BITS
    return groups * bits - (-left_over * bits // _WORD_BITS)


def _overlaps(bits: int) -> list[tuple[int, int, int]]:
    """Returns the words of 32 codes, as triples: code, word, and left shift in the word."""
    shifts = ((code, code * bits // _WORD_BITS, code * bits % _WORD_BITS) for code in range(32))
    return [
        (code, word + next_word, shift - _WORD_BITS * next_word)
        for code, word, shift in shifts
        for next_word in range(1 + (shift + bits > _WORD_BITS))
    ]


def _shifted(words: tf.Tensor, shift: int) -> tf.Tensor:
    by: Callable[..., tf.Tensor] = tf.bitwise.left_shift if shift > 0 else tf.bitwise.right_shift
    return by(words, tf.constant(abs(shift), words.dtype)) if shift else words


@tf.function(autograph=False, reduce_retracing=True)  # a shorter graph
def pack_codes(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """Codes of any number of bits in whole words, the first in the lowest bits; int32 [words]."""
    padded = tf.pad(tf.cast(codes, tf.uint32), [[0, -tf.size(codes) % 32]])
    columns = tf.unstack(tf.reshape(padded, [-1, 32]), axis=1)
    words = [tf.zeros_like(columns[0]) for _ in range(bits)]
    for code, word, shift in _overlaps(bits):
        words[word] = tf.bitwise.bitwise_or(words[word], _shifted(columns[code], shift))
    packed = tf.reshape(tf.stack(words, 1), [-1])
    return tf.bitcast(packed[: words_of(tf.size(codes), bits)], tf.int32)


@tf.function(autograph=False, reduce_retracing=True)
def unpack_codes(words: tf.Tensor, bits: int, number: tf.Tensor) -> tf.Tensor:
    """The first `number` codes in words; int32 [number]."""
    padded = tf.pad(tf.bitcast(words, tf.uint32), [[0, -tf.size(words) % bits]])
    columns = tf.unstack(tf.reshape(padded, [-1, bits]), axis=1)
    codes = [tf.zeros_like(columns[0]) for _ in range(32)]
    for code, word, shift in _overlaps(bits):
        codes[code] = tf.bitwise.bitwise_or(codes[code], _shifted(columns[word], -shift))
    mask = tf.constant(2**bits - 1, tf.uint32)
    masked = tf.bitwise.bitwise_and(tf.reshape(tf.stack(codes, 1), [-1]), mask)
    return tf.cast(masked, tf.int32)[:number]
