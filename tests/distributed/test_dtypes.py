"""Tests that two workers equal one process, for other dtypes than float32 and eager functions."""

import functools
from pathlib import Path

import numpy as np
import pytest

from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "dtypes.py"
CHECKS = {
    "unwrapped": ("state", "predictions", "functions_run_eagerly"),
    "optimizer": (
        "unused_accumulating",
        "unused_with_bfloat16",
        "functions_run_eagerly",
    ),
    "strategy": ("unused", "functions_run_eagerly"),
}
ALL = sorted({check for some in CHECKS.values() for check in some})
# A sum over the 16 rows of a batch and 8 features may round in each term, and does so in 8 steps.
ROUNDING = 8 * 16 * 8 * 2.0**-24


@functools.cache
def seen(way):
    checks = ALL if way == "alone" else CHECKS[way]
    return [
        result(worker)
        for worker in run_workers(PROGRAM, 1 if way == "alone" else 2, [way, ",".join(checks)])
    ]


@pytest.mark.parametrize("check", ["state", "predictions"])
def test_all_bits_equal_one_process_in(check):
    first, second = (worker[check] for worker in seen("unwrapped"))
    assert first == second
    assert first == seen("alone")[0][check]


@pytest.mark.parametrize(
    ("way", "check"), [(way, check) for way in CHECKS for check in CHECKS[way] if "unused" in check]
)
def test_variables_without_gradients_do_no_harm(way, check):
    first, second = (worker[check] for worker in seen(way))
    assert first == second
    # With bfloat16, each of 8 steps rounds the gradients' two halves, their sum, and the weights.
    rounding = 8 * 4 * 2.0**-8 if "bfloat16" in check else ROUNDING
    assert_close(first, seen("alone")[0][check], rounding)


@pytest.mark.parametrize("way", CHECKS)
def test_programs_whose_functions_run_eagerly_train_as_one_process(way):
    first, second = (worker["functions_run_eagerly"] for worker in seen(way))
    assert first == second
    (single,) = seen("alone")
    expected = single["functions_run_eagerly"]
    for name, values in expected["history"].items():
        assert_close(first["history"][name], values)
    for name in ("evaluated", "predicted", "weights"):
        assert_close(first[name], expected[name])


def assert_close(values, expected, rounding=ROUNDING):
    assert len(values) == len(expected)
    for value, like in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, like, atol=rounding * np.abs(like).max())
