"""Short payloads of TopK in NumPy: places within chunks, and values of few bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tests.reference import payload as payload_format
from tests.reference import value_bits as few_bits

Arrays = list[np.ndarray]


class _Tensor(NamedTuple):
    """Returns the parts of a payload for a tensor that sends entries."""

    places: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Short:
    """The format: numbers of entries, 0 for a tensor sent whole; chunk; bits of a value."""

    entries: Sequence[int]
    chunk: int | None
    bits: int

    def encode(
        self, plain: np.ndarray, left: Arrays, _: Sequence[int]
    ) -> tuple[np.ndarray, Arrays, list[int]]:
        """Makes a short payload of what `top_k.encode_payload` returned; returns the same."""
        header, body = payload_format.read(plain)
        sizes = [residual.size for residual in left]
        coded, whole = self._split(np.frombuffer(body, "<u4"), sizes)
        words, sent = self._written(coded, whole, sizes)
        if header.flags:
            payload = payload_format.write(header, bytes(len(words)))
            return payload, left, self._tensor_bytes(sizes)
        after = [residual.copy() for residual in left]
        coded_tensors = [i for i, count in enumerate(self.entries) if count]
        for i, tensor, values in zip(coded_tensors, coded, sent, strict=True):
            after[i].reshape(-1)[tensor.places] += tensor.values - values
        return payload_format.write(header, words), after, self._tensor_bytes(sizes)

    def decode(
        self, payload: np.ndarray, shapes: Sequence[Sequence[int]]
    ) -> list[np.ndarray] | None:
        """Decodes a payload, one array for each tensor; None if it was not finite."""
        header, body = payload_format.read(payload)
        if header.flags:
            return None
        words = np.frombuffer(body, "<u4")
        sizes = [int(np.prod(shape)) for shape in shapes]
        coded = [(size, count) for size, count in zip(sizes, self.entries, strict=True) if count]
        counts = [count for _, count in coded]
        scales, words = np.split(words, [few_bits.SCALES[self.bits] * len(counts)])
        if self.chunk is None:
            indices, words = np.split(words, [sum(counts)])
            tensor_indices = np.split(indices, np.cumsum(counts))[:-1]
        else:
            chunks = [-(-size // self.chunk) for size, _ in coded]
            figures, words = _unpack(words, self.chunk.bit_length(), sum(chunks))
            local, words = _unpack(words, self.chunk.bit_length() - 1, sum(counts))
            begins = np.concatenate([np.arange(n) * self.chunk for n in chunks] or [local])
            indices = np.repeat(begins, figures) + local
            tensor_indices = np.split(indices, np.cumsum(counts))[:-1]
        codes, words = _unpack(words, self.bits, sum(counts))
        if self.bits == 32:
            values = np.split(codes.astype("<u4").view("<f4"), np.cumsum(counts))[:-1]
        else:
            values = few_bits.decode_codes(scales.view("<f4"), codes, counts, self.bits)
        pairs = iter(zip(tensor_indices, values, strict=True))
        decoded = []
        for size, count, shape in zip(sizes, self.entries, shapes, strict=True):
            if count:
                tensor = np.zeros(size, np.float32)
                at, sent = next(pairs)
                tensor[at] = sent
            else:
                tensor, words = np.split(words, [size])
                tensor = tensor.view("<f4")
            decoded.append(tensor.reshape(shape))
        return decoded

    def _split(self, words: np.ndarray, sizes: Sequence[int]) -> tuple[list[_Tensor], Arrays]:
        coded, whole = [], []
        for count, size in zip(self.entries, sizes, strict=True):
            if count:
                indices, values, words = np.split(words, [count, 2 * count])
                coded.append(_Tensor(indices, values.view("<f4")))
            else:
                tensor, words = np.split(words, [size])
                whole.append(tensor)
        return coded, whole

    def _written(
        self, coded: Sequence[_Tensor], whole: Arrays, sizes: Sequence[int]
    ) -> tuple[bytes, Arrays]:
        """The body, and the values that it stands for."""
        values = [tensor.values for tensor in coded]
        indices = [tensor.places for tensor in coded]
        if self.bits == 32:
            scales, codes, sent = np.zeros(0, "<f4"), [v.view("<u4") for v in values], values
        else:
            scales, codes = few_bits.encode_codes(values, self.bits)
            joined = np.concatenate([*codes, np.zeros(0, np.int64)])
            sent = few_bits.decode_codes(scales, joined, [v.size for v in values], self.bits)
        written = [scales.tobytes()]
        if self.chunk is None:
            written += [index.astype("<u4").tobytes() for index in indices]
        else:
            elements = [size for size, n in zip(sizes, self.entries, strict=True) if n]
            figures = [
                np.bincount(index // self.chunk, minlength=-(-size // self.chunk))
                for index, size in zip(indices, elements, strict=True)
            ]
            local = [index % self.chunk for index in indices]
            written.append(_pack(figures, self.chunk.bit_length()))
            written.append(_pack(local, self.chunk.bit_length() - 1))
        written.append(_pack(codes, self.bits))
        return b"".join(written + [tensor.tobytes() for tensor in whole]), sent

    def _tensor_bytes(self, sizes: Sequence[int]) -> list[int]:
        counted = []
        for count, size in zip(self.entries, sizes, strict=True):
            bits = count * self.bits + 32 * few_bits.SCALES[self.bits]
            if self.chunk is None:
                bits += 32 * count
            else:
                bits += count * (self.chunk.bit_length() - 1)
                bits += -(-size // self.chunk) * self.chunk.bit_length()
            counted.append(bits // 8 if count else 4 * size)
        return counted


def _pack(parts: Sequence[np.ndarray], bits: int) -> bytes:
    """Codes of a few bits, one behind the other from the lowest bit on, in whole words."""
    codes = np.concatenate([*parts, np.zeros(0, np.int64)]).astype("<u4")
    each = np.unpackbits(codes.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    data = np.packbits(each[:, :bits], bitorder="little").tobytes()
    return data + b"\0" * (-len(data) % 4)


def _unpack(words: np.ndarray, bits: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The first codes in words, and the words behind them."""
    local, rest = np.split(words, [-(-number * bits // 32)])
    parts = np.unpackbits(local.view(np.uint8), bitorder="little")[: number * bits]
    codes = parts.reshape(number, bits) @ (np.int64(1) << np.arange(bits))
    return codes, rest
