"""Tests L-GreCo's dynamic programme: the golden case, brute force, and refusals."""

import itertools
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.reference import lgreco
from tf_gradcomp import ops

pytestmark = pytest.mark.quick

PLANNERS = [ops.knapsack, lgreco.plan]
SIZES = np.array([[1.0, 2.0, 40.0], [100.0, 200.0, 400.0], [10.0, 20.0, 40.0]])
ERRORS = np.array([[9.0, 5.0, 1.0], [5.5, 4.0, 2.0], [4.0, 2.0, 1.0]])


def random_case(rng, layers, choices):
    """Sizes and errors, float64 [layers, choices] each."""
    sizes = rng.integers(1, 101, (layers, choices)).astype(np.float64)
    return sizes, rng.uniform(0, 1, (layers, choices))


def total(table, plan):
    return sum(of_one[place] for of_one, place in zip(table, plan, strict=True))


def smallest(sizes, errors, budget):
    """Returns the size of the smallest plan within the budget."""
    plans = np.array(list(itertools.product(range(sizes.shape[1]), repeat=len(sizes))))
    layers = np.arange(len(sizes))
    within = errors[layers, plans].sum(1) <= budget
    return sizes[layers, plans].sum(1)[within].min()


@pytest.mark.parametrize("plan", PLANNERS)
def test_the_golden_case(plan):
    chosen = plan(SIZES, ERRORS, [1, 1, 1])
    assert chosen == [2, 0, 0]
    assert total(SIZES, chosen) == 150
    assert total(ERRORS, chosen) == 10.5


@pytest.mark.parametrize("plan", PLANNERS)
def test_a_larger_budget_sends_less_and_a_smaller_one_keeps_within(plan):
    assert plan(SIZES, ERRORS, [1, 1, 1], budget=2.0) == [0, 0, 0]
    halved = plan(SIZES, ERRORS, [1, 1, 1], budget=0.5)  # more than the uniform choices send
    assert halved == [2, 2, 1]
    assert total(ERRORS, halved) <= 5.5


@pytest.mark.parametrize("plan", PLANNERS)
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
def test_the_uniform_choices_stay_where_there_is_no_plan(plan, errors):
    assert plan(np.array([[1, 2]] * 3), np.array([errors] * 3), [1, 1, 1]) == [1, 1, 1]
    assert plan([], [], []) == []


@pytest.mark.parametrize("plan", PLANNERS)
@pytest.mark.parametrize("budget", [0.0, np.nan, np.inf])
def test_a_budget_that_is_none_keeps_the_uniform_choices(plan, budget):
    assert plan(SIZES, ERRORS, [1, 1, 1], budget=budget) == [1, 1, 1]


@pytest.mark.parametrize("plan", PLANNERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 1e300])
def test_a_choice_whose_error_is_bad_is_not_taken(plan, bad):
    sizes = [np.array([1, 2, 40, 0]), *SIZES[1:]]
    errors = [np.array([9, 5, 1, bad]), *ERRORS[1:]]
    assert plan(sizes, errors, [1, 1, 1]) == [2, 0, 0]


@pytest.mark.parametrize("plan", PLANNERS)
def test_of_equal_choices_the_first_one_counts(plan):
    assert plan(np.array([[5, 3, 3]]), np.array([[4, 2, 2]]), [0]) == [1]


@pytest.mark.parametrize("plan", PLANNERS)
def test_a_whole_number_of_steps_is_not_rounded_up(plan):
    # Ten times 0.1 is a little less than 1 where it is added up.
    assert plan(np.array([[2, 1]] * 10), np.full((10, 2), 0.1), [0] * 10, steps=10) == [1] * 10


def test_plans_are_as_small_as_the_optimum():
    rng = np.random.default_rng(0)
    best = 0
    for _ in range(200):
        sizes, errors = random_case(rng, 5, 4)
        default = [2] * 5
        chosen = ops.knapsack(sizes, errors, default)
        assert total(errors, chosen) <= total(errors, default) * (1 + 1e-9)
        assert total(sizes, chosen) <= total(sizes, default)
        best += total(sizes, chosen) == smallest(sizes, errors, total(errors, default))
    assert best >= 198


def test_the_op_plans_as_the_reference_does():
    rng = np.random.default_rng(1)
    for layers, choices, steps in [(1, 1, 1), (3, 7, 50), (12, 9, 1023), (30, 20, 4000)]:
        for budget in (0.6, 1.0, 1.7):
            sizes, errors = random_case(rng, layers, choices)
            sizes = np.round(sizes / 20)  # many are equal
            uneven = [rng.integers(1, choices + 1) for _ in range(layers)]
            sizes = [row[:count] for row, count in zip(sizes, uneven, strict=True)]
            errors = [row[:count] for row, count in zip(errors, uneven, strict=True)]
            default = [int(rng.integers(count)) for count in uneven]
            chosen = ops.knapsack(sizes, errors, default, steps, budget)
            assert chosen == lgreco.plan(sizes, errors, default, steps, budget)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"default": [1, 1]}, "2 uniform choices for 3 layers"),
        ({"default": [1, 1, 3]}, r"uniform\[2\] is 3; expected one of 3 choices"),
        ({"default": [-1, 1, 1]}, r"uniform\[0\] is -1"),
        ({"errors": ERRORS[:2]}, "9 sizes and 6 errors; expected 9"),
        ({"steps": 0}, "steps is 0; expected 1 to"),
        ({"steps": 2**20 + 1}, "expected 1 to 1048576"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.knapsack(**{"sizes": SIZES, "errors": ERRORS, "default": [1, 1, 1], **changes})


def test_the_op_plans_a_large_model_in_a_fraction_of_numpys_time():
    sizes, errors = random_case(np.random.default_rng(2), 160, 100)
    default = [50] * 160

    def seconds(plan):
        start = time.process_time()
        chosen = plan(sizes, errors, default)
        return time.process_time() - start, chosen

    expected = seconds(lgreco.plan)
    runs = [seconds(ops.knapsack) for _ in range(3)]
    assert all(chosen == expected[1] for _, chosen in runs)
    assert min(run[0] for run in runs) < expected[0] / 2
