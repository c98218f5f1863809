"""ARC-Top-K in NumPy (Chen et al., https://arxiv.org/abs/2510.26709), of blocks instead of rows.

A sketch sums the entries of a block with random signs, in groups, where the paper multiplies with
Gaussian numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

MIXING = np.int64(-7046029254386353131)


def signs(step: int, count: int) -> np.ndarray:
    """Returns 1 or -1 for each entry of a block, equal on all replicas."""
    with np.errstate(over="ignore"):
        mixed = (np.int64(step) * count + np.arange(1, count + 1)) * MIXING
        mixed = (mixed ^ (mixed >> 32)) * MIXING
    return np.where(mixed >> 40 & 1, -1, 1).astype(np.float32)


def in_blocks(tensor: np.ndarray, block: int) -> np.ndarray:
    """Returns the entries as [blocks, block]; zeros fill the last one."""
    flat = tensor.reshape(-1)
    return np.pad(flat, (0, -flat.size % block)).reshape(-1, block)


def sketch(tensor: np.ndarray, step: int, block: int, rank: int) -> np.ndarray:
    """Returns [blocks, rank], bfloat16."""
    groups = (in_blocks(tensor, block) * signs(step, block)).reshape(-1, block // rank, rank)
    return groups.sum(1).astype(ml_dtypes.bfloat16)


def choose(sketches: Sequence[np.ndarray], sent: int) -> np.ndarray:
    """Returns the blocks that all replicas send, by all their sketches."""
    total = sketches[0]
    for sketch_of_replica in sketches[1:]:
        total = total + sketch_of_replica
    values = total.astype(np.float32)
    largest = np.abs(values).max()
    scores = np.square(values / largest if largest else values).sum(1)
    return np.argsort(-scores, kind="stable")[:sent]


def take(tensor: np.ndarray, blocks: np.ndarray, block: int) -> np.ndarray:
    """Returns the values that are sent, block after block."""
    return in_blocks(tensor, block)[blocks].reshape(-1)


def spread(values: np.ndarray, blocks: np.ndarray, block: int, like: np.ndarray) -> np.ndarray:
    """Returns zeros in the shape of `like`, except the values in their blocks."""
    result = np.zeros_like(in_blocks(like, block))
    result[blocks] = values.reshape(-1, block)
    return result.reshape(-1)[: like.size].reshape(like.shape)
