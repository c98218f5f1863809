"""Max-norm quantization in NumPy (arXiv 2109.12497): codes of a common scale, and their sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference import philox

METHOD = 8
SMALLEST = np.float32(1e-35)  # of a scale that is used


def uniform(replica: int, tensor: int, step: int, size: int) -> np.ndarray:
    """Returns random float32 from 0 to 1, multiples of 2^-23."""
    drawn = philox.words(replica << 32, tensor, step, size)
    return (drawn & np.uint64(2**23 - 1)).astype(np.float32) * np.float32(2**-23)


def shares(values: np.ndarray, scale: np.float32) -> np.ndarray:
    """Values as shares of the scale; zeros if it is too small."""
    return values / scale if scale >= SMALLEST else np.zeros_like(values)


def steps_of(shares_of_all: Sequence[np.ndarray], bits: Sequence[int]) -> np.ndarray:
    """Returns how many units the scale has, for each entry.

    The finer of two units is taken where no replica's code in it has more bits than the coarse one.
    """
    coarse, fine = np.float32(2 ** bits[0] - 1), np.float32(2 ** bits[-1] - 1)
    fits = [np.abs(shares) * fine <= coarse for shares in shares_of_all]
    return np.where(np.all(fits, 0), fine, coarse)


def rounded(positions: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Returns whole numbers, up where the random number is below the fraction."""
    below = np.floor(positions)
    return below + (random < positions - below)


def width_of_codes(bits: int, replicas: int) -> int:
    """Bits of the sum of codes from 0 to 2^(bits + 1) - 2, as for a power of two of replicas."""
    return bits + 1 + (replicas - 1).bit_length()


def words(size: int, width: int) -> int:
    return -(-size // (63 // width))


def pack(values: np.ndarray, width: int) -> np.ndarray:
    """Packs numbers into int64 words, where the first numbers have the lowest bits of all words."""
    lanes = 63 // width
    padded = np.zeros(lanes * words(values.size, width), np.int64)
    padded[: values.size] = values
    shifts = np.arange(lanes, dtype=np.int64)[:, np.newaxis] * width
    return (padded.reshape(lanes, -1) << shifts).sum(0)
