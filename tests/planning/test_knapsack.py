"""Tests L-GreCo's dynamic programme: the golden case, brute force, and refusals."""

import itertools

import numpy as np
import pytest

from tf_gradcomp.compressors.plans import knapsack

pytestmark = pytest.mark.quick

SIZES = np.array([[1.0, 2.0, 40.0], [100.0, 200.0, 400.0], [10.0, 20.0, 40.0]])
ERRORS = np.array([[9.0, 5.0, 1.0], [5.5, 4.0, 2.0], [4.0, 2.0, 1.0]])


def random_case(rng, layers, choices):
    """Sizes and errors, float64 [layers, choices] each."""
    sizes = rng.integers(1, 101, (layers, choices)).astype(np.float64)
    return sizes, rng.uniform(0, 1, (layers, choices))


def total(table, plan):
    return sum(costs[choice] for costs, choice in zip(table, plan, strict=True))


def smallest(sizes, errors, budget):
    """Returns the size of the smallest plan within the budget."""
    plans = np.array(list(itertools.product(range(sizes.shape[1]), repeat=len(sizes))))
    layers = np.arange(len(sizes))
    within = errors[layers, plans].sum(1) <= budget
    return sizes[layers, plans].sum(1)[within].min()


def test_the_golden_case():
    chosen = knapsack(SIZES, ERRORS, [1, 1, 1])
    assert chosen == [2, 0, 0]
    assert total(SIZES, chosen) == 150
    assert total(ERRORS, chosen) == 10.5


@pytest.mark.parametrize(
    "errors",
    [
        [9, 1 / 3],  # the uniform choices, rounded up, are above their own budget
        [0, 0],
        [np.nan, np.nan],
        [1, np.nan],
        [1, np.inf],
    ],
)
def test_the_uniform_choices_stay_where_there_is_no_plan(errors):
    assert knapsack(np.array([[1, 2]] * 3), np.array([errors] * 3), [1, 1, 1]) == [1, 1, 1]
    assert knapsack([], [], []) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 1e300])
def test_a_choice_whose_error_is_bad_is_not_taken(bad):
    sizes = [np.array([1, 2, 40, 0]), *SIZES[1:]]
    errors = [np.array([9, 5, 1, bad]), *ERRORS[1:]]
    assert knapsack(sizes, errors, [1, 1, 1]) == [2, 0, 0]


def test_of_equal_choices_the_first_one_counts():
    assert knapsack(np.array([[5, 3, 3]]), np.array([[4, 2, 2]]), [0]) == [1]


def test_a_whole_number_of_steps_is_not_rounded_up():
    # Ten times 0.1 is a little less than 1 where it is added up.
    assert knapsack(np.array([[2, 1]] * 10), np.full((10, 2), 0.1), [0] * 10, steps=10) == [1] * 10


def test_plans_are_as_small_as_the_optimum():
    rng = np.random.default_rng(0)
    best = 0
    for _ in range(200):
        sizes, errors = random_case(rng, 5, 4)
        default = [2] * 5
        chosen = knapsack(sizes, errors, default)
        assert total(errors, chosen) <= total(errors, default) * (1 + 1e-9)
        assert total(sizes, chosen) <= total(sizes, default)
        best += total(sizes, chosen) == smallest(sizes, errors, total(errors, default))
    assert best >= 198
