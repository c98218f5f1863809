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
    """The results of one step of PowerSGD for one tensor; all float64."""

    rights: list[np.ndarray]  # by replica, [m, r]: the second summed vector
    reduced: np.ndarray  # in the tensor's shape
    residuals: list[np.ndarray]  # by replica, in the tensor's shape
    factor: np.ndarray  # [m, r], for the next step


def step(tensors: Sequence[np.ndarray], factor: np.ndarray) -> Step:
    """The results of a step, for all replicas.

    Args:
        tensors: By replica, residual plus gradient, seen as [n, m], m being the last axis.
        factor: [m, r], without columns of zeros; or [0], to send the tensor whole.
    """
    if factor.size == 0:
        zeros = [np.zeros(tensor.shape) for tensor in tensors]
        return Step([factor for _ in tensors], sum(tensors, np.zeros(())), zeros, factor)
    matrices = [tensor.reshape(-1, len(factor)).astype(np.float64) for tensor in tensors]
    left = orthonormal(sum(matrix @ factor for matrix in matrices))
    rights = [matrix.T @ left for matrix in matrices]
    total = sum(rights)
    lengths = np.linalg.norm(total, axis=0)
    shape = tensors[0].shape
    return Step(
        rights,
        (left @ total.T).reshape(shape),
        [(m - left @ right.T).reshape(shape) for m, right in zip(matrices, rights, strict=True)],
        total / np.where(lengths > 0, lengths, 1),
    )


class Alternated(NamedTuple):
    """The results of one step of ACP-SGD for one tensor; all float64."""

    sent: list[np.ndarray]  # by replica: P or Q, [r, n] or [r, m]; or the tensor
    reduced: np.ndarray  # in the tensor's shape
    residuals: list[np.ndarray]  # by replica, in the tensor's shape
    factor: np.ndarray  # [n + m, r], P above Q, for the next step; one of both is zeros


def sends_right(tensor: np.ndarray, factor: np.ndarray) -> bool:
    """Returns whether P is known from the step before, so that Q is sent.

    Args:
        tensor: Seen as [n, m], m being the last axis.
        factor: [n + m, r], or [0], to send the tensor whole.
    """
    return bool(factor.size) and bool(factor[: len(factor) - tensor.shape[-1]].any())


def known(tensor: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Returns the half of the factor that is known: P if Q is sent, and Q if P is sent."""
    if not factor.size:
        return factor
    rows = len(factor) - tensor.shape[-1]
    return factor[:rows] if sends_right(tensor, factor) else factor[rows:]


def alternate(tensors: Sequence[np.ndarray], columns: np.ndarray, *, right: bool) -> Alternated:
    """The results of a step of ACP-SGD (Zhang et al., ICDCS 2023), for all replicas.

    Args:
        tensors: By replica, residual plus gradient.
        columns: The known half of the factor, without columns of zeros; [0] to send tensors whole.
        right: Whether that half is P.
    """
    if columns.size == 0:
        zeros = [np.zeros(tensor.shape) for tensor in tensors]
        return Alternated(list(tensors), sum(tensors, np.zeros(())), zeros, columns)
    shape = tensors[0].shape
    matrices = [tensor.reshape(-1, shape[-1]).astype(np.float64) for tensor in tensors]
    basis = orthonormal(columns)

    def product(sent: np.ndarray) -> np.ndarray:
        return (basis @ sent.T if right else sent @ basis.T).reshape(shape)

    sent = [(matrix.T if right else matrix) @ basis for matrix in matrices]
    total = sum(sent)
    lengths = np.linalg.norm(total, axis=0)
    halves = [np.zeros_like(basis), total / np.where(lengths > 0, lengths, 1)]
    return Alternated(
        [factor.T for factor in sent],
        product(total),
        [m.reshape(shape) - product(factor) for m, factor in zip(matrices, sent, strict=True)],
        np.concatenate(halves if right else halves[::-1]),
    )


def in_force(stored: np.ndarray, rank: int) -> np.ndarray:
    """Returns the first columns of a stored factor, [m, r] or [0], from [m, R] or [0]."""
    return stored[:, :rank] if rank else np.zeros(0)


def stored(factor: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Returns a factor in the shape of `like`, with zeros after the used columns."""
    kept = np.zeros(like.shape)
    if factor.size:
        kept[:, : factor.shape[1]] = factor
    return kept


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
        factors: By tensor, [m, r], r being the rank in force; or [0] for one that is sent whole.
        step: The number of the step.
    """
    random = np.random.RandomState(step % 2**32)  # the same numbers as std::mt19937
    started = []
    for factor in factors:
        columns = factor.T.astype(np.float64)
        for column in columns if factor.size else ():
            if not column.any():
                bits = random.randint(0, 2**32, column.size, np.uint32)
                column[:] = bits.view(np.int32).astype(np.float32) * np.float32(2**-31)
        started.append(columns.T)
    return started
