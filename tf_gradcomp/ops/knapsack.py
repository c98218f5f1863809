"""L-GreCo's plan: the op that chooses for all layers together.

Source: Markov et al., "L-GreCo: Layerwise-Adaptive Gradient Compression for Efficient Data-parallel
Deep Learning", MLSys 2024, https://arxiv.org/abs/2210.17357, Algorithm 1.
`tests.reference.lgreco` is the same in NumPy.
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
    """Chooses for each layer, so that all together are smallest and their errors within a budget.

    Each error is rounded up to a whole number of steps, so the budget is never exceeded.

    Args:
        sizes: For each layer, float64 [choices]: what each choice sends.
        errors: The same shapes: what each choice misses, 0 or more. One that is not finite is not
            chosen.
        default: For each layer, the place of its uniform choice. The sum of their errors, times
            `budget`, is what may be used.
        steps: Into how many steps the budget is divided, 1 to 2^20.
        budget: At least 0.

    Returns:
        For each layer, the place of what is chosen. `default`, if the budget is zero or not finite,
        or nothing within it is smaller than `default` while that is within it, too.

    Raises:
        tf.errors.InvalidArgumentError: If numbers of choices differ, or a default is not one of
            them.
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
