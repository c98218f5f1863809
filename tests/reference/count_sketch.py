"""Count sketches in NumPy: sums of random columns with random signs, and estimates by medians."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference import philox

ROWS = 3
Hashes = list[tuple[np.ndarray, np.ndarray]]  # the columns and the signs of all entries, by row


def hashes(step: int, size: int, columns: int) -> Hashes:
    """Returns the column and the sign of each entry in each row."""
    words = [philox.words(0, row, step, size).astype(np.int64) for row in range(ROWS)]
    return [
        (word % 2**31 % columns, np.where(word < 2**31, 1, -1).astype(np.float32)) for word in words
    ]


def sketch(values: np.ndarray, hashed: Hashes, columns: int) -> np.ndarray:
    """Returns the sums, float32 [rows, columns]; the entries are added in their order."""
    table = np.zeros((len(hashed), columns), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for row, (buckets, signs) in zip(table, hashed, strict=True):
            np.add.at(row, buckets, signs * values)
    return table


def estimates(table: np.ndarray, hashed: Hashes) -> np.ndarray:
    """Returns the estimate of each entry."""
    table = np.where(np.isnan(table), np.float32(np.inf), table)
    row_estimates = [
        signs * row[buckets] for row, (buckets, signs) in zip(table, hashed, strict=True)
    ]
    return np.sort(row_estimates, 0)[len(hashed) // 2]


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the places of the largest magnitudes; of equal ones the first."""
    return np.argsort(-np.abs(values), kind="stable")[:count]


def sizes(elements: int, density: float) -> Sequence[int]:
    """Returns how many columns a row has, and how many candidates there are."""
    unit = max(1, round(density * elements))
    return 4 * unit, 4 * unit
