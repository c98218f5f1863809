"""Graphs of gossip, which define the neighbours of each worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

RANDOM_PAIRS = "random_pairs"


def matchings_of(graph: str, size: int) -> np.ndarray:
    """Returns a graph as matchings; in each matching, a worker has at most one partner.

    Args:
        graph: One of `GRAPHS`.
        size: The number of workers, at least 2.

    Returns:
        int32 [matchings, size], the partner of each worker; the worker itself if it has none.

    Raises:
        ValueError: If the graph does not exist for `size` workers.
    """
    return _MATCHINGS[graph](size)


def degree(graph: str, size: int) -> int:
    """Returns the number of partners that a worker has in a round."""
    if graph == RANDOM_PAIRS:
        return 1
    return int(np.sum(matchings_of(graph, size)[:, 0] != 0))


def _ring(size: int) -> np.ndarray:
    return _matched(((worker, (worker + 1) % size) for worker in range(size)), size)


def _torus(size: int) -> np.ndarray:
    rows = max(i for i in range(1, math.isqrt(size) + 1) if size % i == 0)
    if rows == 1:
        raise ValueError(
            f"Gossip: {size} workers cannot form a torus, which needs a product of two numbers "
            'above 1; use graph="ring", or another number of workers.'
        )
    places = np.arange(size).reshape(rows, -1)
    edges = [
        pair
        for axis in (0, 1)
        for pair in zip(places.flat, np.roll(places, -1, axis).flat, strict=True)
    ]
    return _matched(edges, size)


def _matched(edges: Iterable[tuple[Any, Any]], size: int) -> np.ndarray:
    """Distributes edges over matchings; duplicate edges count once."""
    matchings: list[np.ndarray] = []
    for one, other in sorted({(int(min(edge)), int(max(edge))) for edge in edges}):
        pair = [one, other]
        free = (own for own in matchings if own[one] == one and own[other] == other)
        matching = next(free, None)
        if matching is None:
            matching = np.arange(size, dtype=np.int32)
            matchings.append(matching)
        matching[pair] = pair[::-1]
    return np.stack(matchings)


def _round_robin(size: int) -> np.ndarray:
    """Returns the rounds of a round-robin tournament: each pair of workers meets in one round."""
    odd = size - 1 + size % 2
    workers = np.arange(odd)
    matchings = np.tile(np.arange(size, dtype=np.int32), (odd, 1))
    for number, matching in enumerate(matchings):
        matching[:odd] = (number - workers) % odd
        if odd < size:  # the last worker is the partner of the worker that would rest
            resting = int(np.flatnonzero(matching[:odd] == workers)[0])
            matching[resting], matching[odd] = odd, resting
    return matchings


_MATCHINGS: dict[str, Callable[[int], np.ndarray]] = {
    "ring": _ring,
    "torus": _torus,
    "fully_connected": _round_robin,
    RANDOM_PAIRS: _round_robin,
}
GRAPHS = tuple(_MATCHINGS)
