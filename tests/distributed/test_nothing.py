"""Tests that jobs with nothing to train or to exchange continue without a crash."""

import functools
from pathlib import Path

import pytest

from tests.bounds import assert_close
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs/nothing.py"
BATCHES = 4


@functools.cache
def seen(way):
    return [result(worker) for worker in run_workers(PROGRAM, 1 if way == "alone" else 2, [way])]


@pytest.fixture(params=["optimizer", "strategy"])
def workers(request):
    return seen(request.param)


def test_a_model_without_trainable_variables_has_the_losses_of_one_process(workers):
    (single,) = seen("alone")
    for worker in workers:
        # A loss is a mean over 64 rows of sums over at most 32 inputs.
        assert_close(worker["frozen"]["losses"], single["frozen"]["losses"], terms=64 + 2 * 32)
        assert worker["frozen"]["unchanged"]


def test_callbacks_read_learning_rate_and_iterations_as_numbers(workers):
    for worker in workers:
        assert worker["numbers"] == [[0.25, 1 + batch] for batch in range(BATCHES)]


def test_tensors_without_elements(workers):
    for worker in workers:
        created = worker["empty_tensors"]
        assert created.pop("reduced", []) == []
        assert created == {
            "built": True,
            "shape": [0, 3],
            "gathered": [0, 3],
            "summed": [0, 3],
            "exchange": True,
            "residuals": 0.0,
        }
