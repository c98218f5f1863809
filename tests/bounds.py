"""Bounds for numbers that differ only by rounding, derived from the arithmetic.

An operation on floats rounds its result by at most `u` times its magnitude: `u` is 2^-24 for
float32. A sum of n terms x is rounded n - 1 times, each time by at most `u` times the sum of all
|x|. Two computations of one value, in different orders or with different instructions, therefore
differ by at most twice this bound. No bound here comes from a machine's results.

Numbers that are computed by the same operations in the same order are compared for equality.
Sums of two terms in either order, and products with powers of two, are also exact.
"""

import numpy as np

_UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}


def rounding(scale, terms=1, steps=1, dtype="float32"):
    """Returns how far two ways to compute one value may be apart.

    Args:
        scale: The largest magnitude of an intermediate result. For a sum whose terms cancel, that
            is the sum of their magnitudes.
        terms: How often one step rounds: once for each term of a sum and each other operation.
        steps: How often that is repeated on the result.
        dtype: The dtype of the results.
    """
    return 2 * terms * steps * _UNIT_ROUNDOFF[dtype] * np.abs(scale)


def adam_bound(beta_2=0.999):
    """Returns how often second moments and steps of Adam round: the `terms` of `rounding`.

    In float32, `1 - beta_2` and the bias correction `1 - beta_2 ** step` have the rounding of a
    number near 1. Relative to such a small difference, the rounding is larger by `1 / (1 -
    beta_2)`. The other operations of a step are fewer than 20.
    """
    return 1 / (1 - beta_2) + 20


def training(gain, terms, steps, weights=1.0, gradients=1.0, dtype="float32"):
    """Returns how far the weights, in float32, of two trainings may be apart.

    A step rounds a weight and its gradient. The gradient's error moves the weight by `gain` times
    as much. For losses with a curvature of about 1, the next gradients differ like the weights, so
    the difference of one step grows by `1 + gain` in each later step.

    Args:
        gain: How much further a step moves a weight if its gradient is larger by 1. For SGD that is
            the learning rate. For Adam it is at most the learning rate over `epsilon`: the
            derivative of `g / (|g| + epsilon)` is largest at 0, where it is `1 / epsilon`. With
            the default of 1e-7 a gradient of nothing but rounding moves its weight by a whole
            learning rate. So tests give Adam an `epsilon` as large as typical gradients.
        terms: The terms of all sums on the way from a weight to its gradient: rows of the batch,
            and inputs of each layer.
        steps: The steps of training.
        weights: The largest magnitude of a weight.
        gradients: The largest magnitude of a gradient, with the terms' signs left out.
        dtype: The dtype of the terms of gradients.
    """
    step_error = rounding(weights) + gain * rounding(gradients, terms, dtype=dtype)
    return step_error * sum((1 + gain) ** step for step in range(steps))


def assert_close(actual, expected, terms=1, steps=1, scale=None, dtype="float32"):
    """Compares arrays that differ only by rounding; see `rounding`.

    Without a `scale` it is the largest magnitude in what is expected: no entry is more exact than
    that, as it may be a sum whose terms cancel.
    """
    if scale is None:
        scale = np.abs(np.asarray(expected, np.float64)).max(initial=0)
    bound = rounding(scale, terms, steps, dtype)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)
