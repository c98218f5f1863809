"""ScaleCom's values in 16, 8, 4 or 1 bits, in NumPy.

Values with one scale are a part. In 16 bits, replicas sum whole numbers of the leader's scale; in
fewer, each sends codes and scales of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tf_gradcomp.reference import fixed_length

Arrays = list[np.ndarray]

METHOD = 5
LARGEST_EXACT = 2048  # all whole numbers up to it are float16


def largest(values: np.ndarray) -> np.float32:
    """The scale of a part in 16, 8 or 4 bits."""
    return np.abs(values).max()


def most_of(replicas: int) -> int:
    """The power of two that a level may be in 16 bits, so that no sum is rounded."""
    most = LARGEST_EXACT
    while most * replicas > LARGEST_EXACT:
        most //= 2
    return most


def levels(values: np.ndarray, scale: np.float32, most: int) -> np.ndarray:
    """The nearest whole numbers, of which `most` stands for the scale; float32."""
    if scale == 0:
        return np.zeros_like(values)
    with np.errstate(over="ignore"):
        shares = np.clip(values / scale, np.float32(-1), np.float32(1))
    return np.rint(shares * np.float32(most))


def value(numbers: np.ndarray, scale: np.float32, most: int) -> np.ndarray:
    """What levels stand for."""
    return scale * (numbers * np.float32(1 / most))


def encode(parts: Sequence[np.ndarray], bits: int) -> np.ndarray:
    """The body of a payload of 8, 4 or 1 bits: the scales, then the codes; int32 [words]."""
    scales, codes = [], []
    for values in parts:
        if bits == 1:
            scales.append(np.float32(np.abs(values).astype(np.float64).sum() / values.size))
            codes.append(values < 0)
        else:
            scales.append(largest(values))
            codes.append(levels(values, scales[-1], _most(bits)) + 2 ** (bits - 1))
    joined = np.concatenate([*codes, np.zeros(0)]).astype(np.uint8)
    data = np.array(scales, "<f4").tobytes() + fixed_length.pack_bits(joined, bits)
    return np.frombuffer(data, "<i4")


def decode(body: np.ndarray, sizes: Sequence[int], bits: int) -> Arrays:
    """What a body says; one array per part, of `sizes` values."""
    scales = body[: len(sizes)].view("<f4")
    codes = fixed_length.unpack_bits(body[len(sizes) :].tobytes(), bits, sum(sizes))
    numbers = codes.astype(np.float32)
    numbers = 1 - 2 * numbers if bits == 1 else numbers - 2 ** (bits - 1)
    parts = np.split(numbers, np.cumsum(sizes))[: len(sizes)]
    return [value(part, scale, _most(bits)) for part, scale in zip(parts, scales, strict=True)]


def _most(bits: int) -> int:
    return max(1, 2 ** (bits - 1) - 1)
