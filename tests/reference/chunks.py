"""Sums of one entry per chunk, in NumPy: ScaleCom (arXiv 2104.11125, section 3) and RandomK."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Arrays = list[np.ndarray]

_MASK = 2**64 - 1


def select(y: np.ndarray, chunk_size: int) -> np.ndarray:
    """The offset of the largest magnitude in each chunk, the first of equals; uint32 [chunks]."""
    chunks = -(-y.size // chunk_size)
    padded = np.full(chunks * chunk_size, -1.0, np.float32)
    padded[: y.size] = np.abs(y)
    return padded.reshape(chunks, chunk_size).argmax(1).astype(np.uint32)


def draw(sizes: Sequence[int], chunk_sizes: Sequence[int], step: int) -> Arrays:
    """An offset in each chunk of each tensor at random; splitmix64 of step and chunk."""
    stream = _mix(_mix(0) ^ step)
    drawn, chunk = [], 0
    for size, chunk_size in zip(sizes, chunk_sizes, strict=True):
        offsets = []
        for first in range(0, size, chunk_size):
            length = min(chunk_size, size - first)
            offsets.append((_mix(stream ^ chunk) >> 32) * length >> 32)
            chunk += 1
        drawn.append(np.array(offsets, np.uint32))
    return drawn


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


def pack(offsets: np.ndarray, chunk_size: int) -> np.ndarray:
    """Offsets in as many bits as the chunk needs, the first lowest, in whole words; int32."""
    bits = (chunk_size - 1).bit_length()
    ones = (offsets[:, np.newaxis] >> np.arange(bits, dtype=np.uint32)) & 1
    padded = np.zeros(-(-ones.size // 32) * 32, np.uint8)
    padded[: ones.size] = ones.reshape(-1)
    return np.packbits(padded, bitorder="little").view("<i4")


def places(offsets: np.ndarray, chunk_size: int) -> np.ndarray:
    """Returns the positions of the chosen entries in the flattened tensor."""
    return np.arange(offsets.size) * chunk_size + offsets


def keep(
    m: np.ndarray,
    g: np.ndarray,
    at: np.ndarray,
    filter_: float,
    rest: np.ndarray | None = None,
) -> np.ndarray:
    """The residual after the entries `at` of m + g were sent, or all of them but `rest`."""
    beta = np.float32(filter_)
    left = m + beta * g
    left[at] = (np.float32(1) - beta) * m[at]
    if rest is not None:
        left[at] += beta * rest
    return left
