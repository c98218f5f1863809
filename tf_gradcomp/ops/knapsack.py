"""The op that plans the layers' settings for L-GreCo.

Source: Markov et al., "L-GreCo: Layerwise-Adaptive Gradient Compression for Efficient Data-parallel
Deep Learning", MLSys 2024, https://arxiv.org/abs/2210.17357, Algorithm 1.
`tests.reference.lgreco` computes the same in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tf_gradcomp.ops import library


def knapsack(
    sizes: Sequence[np.ndarray],
    errors: Sequence[np.ndarray],
    default: Sequence[int],
    steps: int = 10_000,
    budget: float = 1.0,
) -> list[int]:
    """Makes one choice per layer that minimizes the total size within a budget of errors.

    Each error is rounded up to a whole number of steps, so the budget is never exceeded.

    Args:
        sizes: The size of each choice; float64 [choices] for each layer.
        errors: The error of each choice, 0 or more, in the same shapes. A choice whose error is not
            finite is never made.
        default: The index of each layer's uniform choice. The budget is the sum of the errors of
            these choices, times `budget`.
        steps: The number of steps that the budget is divided into, 1 to 2^20.
        budget: At least 0.

    Returns:
        The index of each layer's choice. Returns `default` if the budget is zero or not finite, or
        if `default` is within the budget and no smaller choices are.
    """
    nothing = np.zeros(0)
    chosen = library.load().knapsack(
        sizes=np.concatenate([nothing, *sizes]),
        errors=np.concatenate([nothing, *errors]),
        choices=np.array([len(of_one) for of_one in sizes], np.int64),
        uniform=np.array(default, np.int64),
        budget=np.float64(budget),
        steps=steps,
    )
    return chosen.numpy().tolist()
