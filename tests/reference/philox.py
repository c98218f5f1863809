"""The published generator Philox4x32-10 in NumPy, as TensorFlow numbers its words."""

from __future__ import annotations

import numpy as np

_LOW = np.uint64(2**32 - 1)
_32 = np.uint64(32)


def words(key: int, stream: int, step: int, size: int) -> np.ndarray:
    """Returns words of 32 bits, as uint64; the counters of a stream begin at 2^40 times it."""
    low = np.arange(-(-size // 4), dtype=np.uint64) + np.uint64(stream * 2**40)
    high = np.full_like(low, step)
    a, b, c, d = low & _LOW, low >> _32, high & _LOW, high >> _32
    for index in range(10):
        keys = [
            np.uint64((half + index * increment) % 2**32)
            for half, increment in ((key % 2**32, 0x9E3779B9), (key >> 32, 0xBB67AE85))
        ]
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (second >> _32) ^ b ^ keys[0], second & _LOW
        c, d = (first >> _32) ^ d ^ keys[1], first & _LOW
    return np.stack([a, b, c, d], 1).reshape(-1)[:size]
