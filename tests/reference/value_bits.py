"""Values of ScaleCom and TopK in few bits, in NumPy.

Values with one scale are a part. With 16 bits, replicas sum whole multiples of the leader's scale;
with fewer bits, each replica sends its own codes and scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference import fixed_length

Arrays = list[np.ndarray]

METHOD = 5
SCALES = {32: 0, 16: 1, 8: 1, 4: 1, 2: 2, 1: 1}  # of a part, by bits
LARGEST_EXACT = 2048  # all whole numbers up to it are float16


def largest(values: np.ndarray) -> np.float32:
    """The scale of a part in 16, 8 or 4 bits."""
    return np.abs(values).max()


def shares(parts: Sequence[np.ndarray], scales: Sequence[np.float32], replicas: int) -> Arrays:
    """Returns a replica's 16-bit terms of a sum, as float32.

    The scale has a power of two of steps, so many that no sum is rounded.
    """
    steps = LARGEST_EXACT
    while steps * replicas > LARGEST_EXACT:
        steps //= 2
    return [
        _levels(values, scale, steps) / np.float32(steps)
        for values, scale in zip(parts, scales, strict=True)
    ]


def encode(parts: Sequence[np.ndarray], bits: int) -> np.ndarray:
    """The body of a payload of 8, 4 or 1 bits: the scales, then the codes; int32 [words]."""
    scales, codes = encode_codes(parts, bits)
    joined = np.concatenate([*codes, np.zeros(0)]).astype(np.uint8)
    data = scales.tobytes() + fixed_length.pack_bits(joined, bits)
    return np.frombuffer(data, "<i4")


def decode(body: np.ndarray, sizes: Sequence[int], bits: int) -> Arrays:
    """Decodes a body; one array per part, of `sizes` values."""
    scales = body[: len(sizes)].view("<f4")
    codes = fixed_length.unpack_bits(body[len(sizes) :].tobytes(), bits, sum(sizes))
    return decode_codes(scales, codes, sizes, bits)


def encode_codes(parts: Sequence[np.ndarray], bits: int) -> tuple[np.ndarray, Arrays]:
    """Returns the scales of all parts, and the codes of each part."""
    scales, codes = [], []
    for values in parts:
        if bits == 1:
            scales.append(_mean(np.abs(values)))
            codes.append(values < 0)
        elif bits == 2:
            above = np.abs(values) > _mean(np.abs(values))
            scales += [_mean(np.abs(values[which])) for which in (~above, above)]
            codes.append((values < 0) + 2 * above)
        else:
            scales.append(largest(values))
            codes.append(_levels(values, scales[-1], 2 ** (bits - 1) - 1) + 2 ** (bits - 1))
    return np.array(scales, "<f4"), codes


def decode_codes(scales: np.ndarray, codes: np.ndarray, sizes: Sequence[int], bits: int) -> Arrays:
    """Returns the values of the codes, as an array for each part."""
    parts = np.split(codes, np.cumsum(sizes))[: len(sizes)]
    if bits == 2:
        pairs = scales.reshape(-1, 2)
        return [
            pair[part // 2] * (1 - 2 * (part % 2)).astype(np.float32)
            for part, pair in zip(parts, pairs, strict=True)
        ]
    values = [part.astype(np.float32) for part in parts]
    if bits == 1:
        shares = [1 - 2 * part for part in values]
    else:
        steps = 2 ** (bits - 1)
        shares = [(part - steps) / np.float32(steps - 1) for part in values]
    return [scale * part for part, scale in zip(shares, scales, strict=True)]


def _mean(magnitudes: np.ndarray) -> np.float32:
    return np.float32(magnitudes.astype(np.float64).sum() / max(1, magnitudes.size))


def _levels(values: np.ndarray, scale: np.float32, steps: int) -> np.ndarray:
    """Returns the nearest whole numbers, float32, where `steps` represents the scale."""
    if scale == 0:
        return np.zeros_like(values)
    with np.errstate(over="ignore"):
        relative = np.clip(values / scale, np.float32(-1), np.float32(1))
    return np.rint(relative * np.float32(steps))
