"""PowerGossip in NumPy, in float64, for all workers at once.

This reference first computes the whole difference of two neighbours, and then multiplies it. Its
bases are singular vectors, so they may differ from the implementation's by a rotation, which
changes no projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Edge = tuple[int, int]
Values = list[np.ndarray]


def ring(size: int) -> list[Edge]:
    return sorted({tuple(sorted((i, (i + 1) % size))) for i in range(size)})


class PowerGossip:
    """Workers whose weights move towards the weights of their neighbours.

    Args:
        edges: Pairs of workers, the lower number first.
        rank: The rank of a move, or None for whole differences.
        share: The share of a neighbour in a worker's mean.
        fresh: Returns the random numbers that replace zero factors: for an edge, a round, and a
            length.
    """

    def __init__(
        self,
        edges: Sequence[Edge],
        rank: int | None,
        share: float,
        fresh: Callable[[Edge, int, int], np.ndarray],
    ) -> None:
        self._edges, self._rank, self._share, self._fresh = edges, rank, share, fresh
        self._kept: dict[tuple[Edge, int, bool], np.ndarray] = {}
        self._time = 0

    def round(self, workers: Sequence[Values]) -> list[Values]:
        """Returns the weights of all workers after a round."""
        self._time += 1
        moved = [[np.array(value, np.float64) for value in values] for values in workers]
        low = [index for index, value in enumerate(workers[0]) if self._is_low(value)]
        rows = not low or self._time % 2 == 1
        for edge in self._edges:
            bases = self._bases(edge, [_matrix(workers[0][index]) for index in low], rows=rows)
            for index in range(len(workers[0])):
                first, second = (np.float64(workers[worker][index]) for worker in edge)
                move = second - first
                if index in low:
                    number = low.index(index)
                    move = self._projected(edge, number, move, bases[number], rows=rows)
                moved[edge[0]][index] += self._share * move
                moved[edge[1]][index] -= self._share * move
        return moved

    def _is_low(self, value: np.ndarray) -> bool:
        return self._rank is not None and value.ndim > 1 and self._rank < min(_matrix(value).shape)

    def _bases(self, edge: Edge, matrices: Values, *, rows: bool) -> Values:
        sides = [matrix.shape[1 if rows else 0] for matrix in matrices]
        drawn = self._fresh(edge, self._time, sum(sides) * (self._rank or 0))
        parts = np.split(drawn, np.cumsum([side * (self._rank or 0) for side in sides])[:-1])
        bases = []
        for index, (part, side) in enumerate(zip(parts, sides, strict=False)):
            other = part.reshape(side, -1)
            factor = self._kept.get((edge, index, not rows), np.zeros_like(other))
            factor = np.where(np.any(factor != 0, 0), factor, other)
            bases.append(np.linalg.svd(factor, full_matrices=False)[0])
        return bases

    def _projected(
        self, edge: Edge, number: int, move: np.ndarray, basis: np.ndarray, *, rows: bool
    ) -> np.ndarray:
        matrix = _matrix(move)
        factor = matrix @ basis if rows else matrix.T @ basis
        self._kept[edge, number, rows] = factor
        return (factor @ basis.T if rows else basis @ factor.T).reshape(move.shape)


def _matrix(value: np.ndarray) -> np.ndarray:
    return value.reshape(-1, value.shape[-1])
