"""ScaleCom's values in 16, 8, 4 or 1 bits, in NumPy.

Values with one scale are a part. In 16 bits, replicas sum whole numbers of the leader's scale; in
fewer, each sends codes and scales of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference import fixed_length

Arrays = list[np.ndarray]

METHOD = 5
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
    scales, codes = [], []
    for values in parts:
        if bits == 1:
            scales.append(np.float32(np.abs(values).astype(np.float64).sum() / values.size))
            codes.append(values < 0)
        else:
            scales.append(largest(values))
            codes.append(_levels(values, scales[-1], 2 ** (bits - 1) - 1) + 2 ** (bits - 1))
    joined = np.concatenate([*codes, np.zeros(0)]).astype(np.uint8)
    data = np.array(scales, "<f4").tobytes() + fixed_length.pack_bits(joined, bits)
    return np.frombuffer(data, "<i4")


def decode(body: np.ndarray, sizes: Sequence[int], bits: int) -> Arrays:
    """Decodes a body; one array per part, of `sizes` values."""
    scales = body[: len(sizes)].view("<f4")
    codes = fixed_length.unpack_bits(body[len(sizes) :].tobytes(), bits, sum(sizes))
    numbers = codes.astype(np.float32)
    if bits == 1:
        shares = 1 - 2 * numbers
    else:
        shares = (numbers - 2 ** (bits - 1)) / np.float32(2 ** (bits - 1) - 1)
    parts = np.split(shares, np.cumsum(sizes))[: len(sizes)]
    return [scale * part for part, scale in zip(parts, scales, strict=True)]


def _levels(values: np.ndarray, scale: np.float32, steps: int) -> np.ndarray:
    """The nearest whole numbers, of which `steps` stands for the scale; float32."""
    if scale == 0:
        return np.zeros_like(values)
    with np.errstate(over="ignore"):
        of_scale = np.clip(values / scale, np.float32(-1), np.float32(1))
    return np.rint(of_scale * np.float32(steps))
