"""The op of SIDCo: the entries above a threshold that is estimated without a sort."""

from __future__ import annotations

import tensorflow as tf

from tf_gradcomp.ops import library


def sidco_choose(values: tf.Tensor, density: float, *, distribution: str, stages: int) -> tf.Tensor:
    """Finds about the largest entries, by fits of a distribution to the magnitudes.

    Each stage fits the distribution to the magnitudes above the threshold of the stage before, and
    takes its quantile as the next threshold (Abdelmoniem et al., MLSys 2021, arXiv 2101.10761).
    Unlike in the paper, the last threshold is corrected three times by the number of entries above
    it. Zeros are never chosen. Among at most 1023 values, the largest are chosen exactly.

    Args:
        values: float32, finite, fewer than 2^31.
        density: The target share of chosen entries, above 0 and below 1.
        distribution: `"pareto"` (generalized) or `"exponential"`.
        stages: Number of fits, 1 or more.

    Returns:
        The places of the chosen entries, ascending, int32: at most twice the share or 64 of them,
        and at least one, unless all values are zero.

    Raises:
        tf.errors.InvalidArgumentError: If `density` is out of range.
    """
    return library.load().sidco_choose(
        values=values,
        density=tf.constant(density, tf.float64),
        distribution=distribution,
        stages=stages,
    )
