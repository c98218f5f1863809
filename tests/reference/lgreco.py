"""L-GreCo's plan in NumPy: the setting of each layer, by dynamic programming.

Markov et al., "L-GreCo: Layerwise-Adaptive Gradient Compression for Efficient Data-parallel Deep
Learning", MLSys 2024, https://arxiv.org/abs/2210.17357, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROUNDING = 1e-9  # of a step: an error that is a whole number of steps is not rounded up


def plan(
    sizes: Sequence[np.ndarray],
    errors: Sequence[np.ndarray],
    default: Sequence[int],
    steps: int = 10_000,
    budget: float = 1.0,
) -> list[int]:
    """Does the work of `tf_gradcomp.ops.knapsack`.

    Where two choices of a layer are equally good, the first one counts.
    """
    layers = range(len(sizes))
    most = budget * _sum_in_order([errors[i][default[i]] for i in layers])
    uniform = _sum_in_order([sizes[i][default[i]] for i in layers])
    if not (np.isfinite(most) and most > 0):
        return list(default)
    with np.errstate(invalid="ignore", over="ignore"):
        weights = [np.ceil(of_one / (most / steps) - ROUNDING) for of_one in errors]
    smallest = np.full(
        steps + 1, np.inf
    )  # the smallest size of the layers so far, by the errors that they use
    smallest[0] = 0
    chosen = np.full((len(sizes), steps + 1), -1)
    for i in layers:
        before, smallest = smallest, np.full(steps + 1, np.inf)
        for choice, (size, weight) in enumerate(zip(sizes[i], weights[i], strict=True)):
            if not 0 <= weight <= steps:  # more than the budget, or no number
                continue
            taken = np.full(steps + 1, np.inf)
            taken[int(weight) :] = before[: steps + 1 - int(weight)] + size
            better = taken < smallest
            smallest[better] = taken[better]
            chosen[i][better] = choice
    used = int(np.argmin(smallest))
    limit = uniform if budget >= 1 else np.inf  # the uniform setting is within the budget
    if not smallest[used] < limit:
        return list(default)
    found = list(default)
    for i in reversed(layers):
        found[i] = int(chosen[i][used])
        used -= int(weights[i][found[i]])
    return found


def _sum_in_order(values: Sequence[float]) -> float:
    """Sums one by one, because NumPy's and Python's sums use other orders."""
    return float(np.cumsum([0.0, *values])[-1])
