"""Learners in one process train as real workers do, step by step."""

from pathlib import Path

import numpy as np
import pytest

from tests.bounds import assert_close, training
from tests.replicas import method_names
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "simulated.py"
WORKERS = 3  # no power of two
# Adam(0.01) has an epsilon of 0.05. Sums are over 10 rows of each of 3 workers, 8 and 64 inputs.
APART = training(gain=0.2, terms=3 * 10 + 8 + 64, steps=12)
# Workers may sum three 16-bit numbers in another order.
APART_IN_FLOAT16 = training(gain=0.2, terms=3, steps=12, dtype="float16")


@pytest.fixture(scope="module")
def jobs():
    """By way: the weights after each step, and the last plan of settings, by method."""
    real = run_workers(PROGRAM, WORKERS, ["real", WORKERS])
    simulated = run_workers(PROGRAM, 1, ["simulated", WORKERS])
    return result(real[0]), result(simulated[0])


@pytest.mark.parametrize(
    "method",
    [
        *(*method_names(), "warmed up", "local steps", "fragments"),
        *("dropout", "dropout in local steps"),  # random numbers, too, are those of the workers
    ],
)
def test_simulation_and_job_agree_step_by_step(jobs, method):
    real, simulated = (job[method]["steps"] for job in jobs)
    assert len(real) == len(simulated) == 12
    # QSGD's payloads, which L-GreCo sends, are decoded and summed in one order.
    bound = {"cast": APART_IN_FLOAT16, "lgreco": 0}.get(method, APART)
    for step, (job, learners) in enumerate(zip(real, simulated, strict=True)):
        for expected, actual in zip(job, learners, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=bound, err_msg=f"{step}")


@pytest.mark.parametrize("method", ["no_compression", "cast", "top_k", "power_sgd", "random_k"])
def test_a_simulation_counts_the_bytes_that_a_job_sends(jobs, method):
    """The payloads of these methods have the same length whatever the gradients are."""
    real, simulated = (job[method]["sent"] for job in jobs)
    assert real == simulated > 0


def test_simulation_and_job_make_the_same_plan(jobs):
    real, simulated = (job["lgreco"]["plan"] for job in jobs)
    settings, ratio, *_ = simulated
    assert real[0] == settings
    for first, second in zip(real[1:], simulated[1:], strict=True):
        assert_close(first, second, terms=128 * 32)  # the elements of the largest gradient
    assert settings != [4, 0, 4, 0, 4, 0]  # the own ones of its method
    assert ratio > 1
    assert all(job["top_k"]["plan"] is None for job in jobs)
