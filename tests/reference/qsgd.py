"""QSGD in NumPy, in the form with a minimum and a unit per bucket: levels, and whole payloads.

Alistarh et al., NeurIPS 2017, https://arxiv.org/abs/1610.02132; in the form of CGX
(https://arxiv.org/abs/2111.08617) and L-GreCo (https://arxiv.org/abs/2210.17357). Every float32
operation happens in the order of the native ops, so that results are equal to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tests.reference import fixed_length
from tests.reference import payload as payload_format

METHOD = 2
LIMIT = np.float32(2**126)  # beyond it, values are sent as the limit, so that nothing overflows

_MASK = 2**64 - 1


@dataclasses.dataclass(frozen=True)
class Qsgd:
    """Levels of some bits in buckets, with the offsets that are added before rounding down."""

    bits: int
    bucket_size: int
    offsets: np.ndarray | float = 0.0  # float32 [n], or one for all elements

    def encode(self, values: np.ndarray) -> bytes:
        """For each bucket its minimum and unit, then the levels."""
        offsets = np.broadcast_to(self.offsets, values.shape)
        return b"".join(
            self._encode_bucket(values[i : i + self.bucket_size], offsets[i : i + self.bucket_size])
            for i in range(0, values.size, self.bucket_size)
        )

    def decode(self, data: bytes, size: int) -> np.ndarray:
        """Minimum + unit * level for each element."""
        decoded = [np.zeros(0, np.float32)]
        while size > 0:
            elements = min(size, self.bucket_size)
            length = 8 + -(-elements * self.bits // 32) * 4
            minimum, unit = np.frombuffer(data, np.float32, 2)
            levels = fixed_length.unpack_bits(data[8:length], self.bits, elements)
            decoded.append(minimum + unit * levels.astype(np.float32))
            data, size = data[length:], size - elements
        return np.concatenate(decoded)

    def _encode_bucket(self, values: np.ndarray, offsets: np.ndarray) -> bytes:
        minimum, unit, levels = quantize(values, self.bits, offsets)
        return minimum.tobytes() + unit.tobytes() + fixed_length.pack_bits(levels, self.bits)


def quantize(
    values: np.ndarray, bits: int, offsets: np.ndarray
) -> tuple[np.float32, np.float32, np.ndarray]:
    """Minimum, unit and levels of one bucket."""
    last_level = np.float32(2**bits - 1)
    minimum = np.clip(values.min(), -LIMIT, LIMIT) + np.float32(0)  # never -0
    unit = (np.clip(values.max(), -LIMIT, LIMIT) - minimum) / last_level
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        positions = (values - minimum) * (np.float32(1) / unit) + offsets
        # Where the inverse is infinite, the minimum has no position, which is not above 0 either.
        levels = np.where(positions > 0, np.minimum(positions, last_level), 0)
    return minimum, unit, levels.astype(np.uint8)


def random_offsets(replica: int, tensor: int, step: int, size: int) -> np.ndarray:
    """Middles of 2^16 steps from 0 to 1, from 16 bits each of a counter-based generator."""
    key = np.array([0, replica & _MASK], np.uint64)
    counter = np.array([0, tensor, step & _MASK, 0], np.uint64)
    words = np.random.Philox(counter=counter, key=key).random_raw(-(-size // 4))
    random = words.astype("<u8").view("<u2")[:size]
    return (random.astype(np.float32) + np.float32(0.5)) * np.float32(2**-16)


def encode_payload(
    residuals: Sequence[np.ndarray],
    gradients: Sequence[np.ndarray],
    step: int,
    *,
    replica: int,
    bits: Sequence[int],
    bucket_size: int,
    fingerprint: int,
) -> tuple[np.ndarray, list[np.ndarray], list[int]]:
    """Does the work of `tf_gradcomp.ops.qsgd_encode`: see `fixed_length.encode_payload`."""
    codecs = [
        dataclasses.replace(
            codec, offsets=random_offsets(replica, tensor, step, residuals[tensor].size)
        )
        if isinstance(codec, Qsgd)
        else codec
        for tensor, codec in enumerate(_codecs(bits, bucket_size))
    ]
    plan = payload_format.plan_of(bits)
    header = payload_format.Header(METHOD, fingerprint, step, len(residuals), plan)
    return fixed_length.encode_payload(header, codecs, residuals, gradients)


def decode_payload(
    payload: np.ndarray, shapes: Sequence[Sequence[int]], bits: Sequence[int], bucket_size: int
) -> list[np.ndarray] | None:
    """Decodes a replica's payload, one array per tensor; None if it was not finite."""
    return fixed_length.decode_payload(payload, _codecs(bits, bucket_size), shapes)


def _codecs(bits: Sequence[int], bucket_size: int) -> list[fixed_length.Codec]:
    return [Qsgd(b, bucket_size) if b else fixed_length.Whole() for b in bits]
