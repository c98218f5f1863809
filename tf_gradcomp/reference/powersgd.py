"""PowerSGD in NumPy, in float64: Algorithms 1 and 2 of the paper.

Vogels et al., NeurIPS 2019, https://arxiv.org/abs/1905.13727. The native ops compute in float32, so
results are equal to rounding errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

VANISHED = 1e-4


class Step(NamedTuple):
    """What PowerSGD makes of one matrix in one step; all float64."""

    lefts: list[np.ndarray]  # by replica, [n, r]: what is summed first
    rights: list[np.ndarray]  # by replica, [m, r]: what is summed then
    reduced: np.ndarray  # [n, m]
    residuals: list[np.ndarray]  # by replica, [n, m]
    factor: np.ndarray  # [m, r], of the next step


def step(matrices: Sequence[np.ndarray], factor: np.ndarray) -> Step:
    """One step of all replicas.

    Args:
        matrices: By replica, residual plus gradient, [n, m].
        factor: [m, r], without columns of zeros.
    """
    matrices = [matrix.astype(np.float64) for matrix in matrices]
    lefts = [matrix @ factor for matrix in matrices]
    left = orthonormal(sum(lefts))
    rights = [matrix.T @ left for matrix in matrices]
    total = sum(rights)
    residuals = [
        matrix - left @ right.T for matrix, right in zip(matrices, rights, strict=True)
    ]
    lengths = np.linalg.norm(total, axis=0)
    scaled = total / np.where(lengths > 0, lengths, 1)
    return Step(lefts, rights, left @ total.T, residuals, scaled)


def orthonormal(columns: np.ndarray) -> np.ndarray:
    """Gram-Schmidt; a column that depends on those before it becomes zero.

    Args:
        columns: [n, r].
    """
    result = np.array(columns, np.float64)
    for k in range(result.shape[1]):
        before = np.linalg.norm(result[:, k])
        for _ in range(2):
            result[:, k] -= result[:, :k] @ (result[:, :k].T @ result[:, k])
        left = np.linalg.norm(result[:, k])
        result[:, k] *= 1 / left if left > VANISHED * before else 0
    return result


def start(factors: Sequence[np.ndarray], step: int) -> list[np.ndarray]:
    """The factors that a step begins with: pseudo-random values in place of columns of zeros.

    Args:
        factors: By matrix, [m, r].
        step: The number of the step.
    """
    random = np.random.RandomState(step % 2**32)
    started = []
    for factor in factors:
        columns = np.array(factor, np.float64)
        for k in np.flatnonzero(~columns.any(axis=0)):
            bits = random.randint(0, 2**32, len(columns), np.uint32)
            columns[:, k] = bits.view(np.int32).astype(np.float32) * np.float32(2**-31)
        started.append(columns)
    return started
