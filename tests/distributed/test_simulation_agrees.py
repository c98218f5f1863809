"""Learners in one process train as real workers do, step by step."""

from pathlib import Path

import numpy as np
import pytest

from tests.replicas import method_names
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "simulated.py"
WORKERS = 3  # no power of two


@pytest.fixture(scope="module")
def jobs():
    """By way: the weights after each step, and the last plan of settings, by method."""
    real = run_workers(PROGRAM, WORKERS, ["real", WORKERS])
    simulated = run_workers(PROGRAM, 1, ["simulated", WORKERS])
    return result(real[0]), result(simulated[0])


@pytest.mark.parametrize("method", [*method_names(), "warmed up"])
def test_simulation_and_job_agree_step_by_step(jobs, method):
    real, simulated = (job[method]["steps"] for job in jobs)
    assert len(real) == len(simulated) == 12
    # Workers may sum 16-bit numbers in another order, and Adam divides by small ones.
    tolerance = 2e-3 if method == "cast" else 1e-5
    for step, (job, learners) in enumerate(zip(real, simulated, strict=True)):
        for expected, actual in zip(job, learners, strict=True):
            np.testing.assert_allclose(actual, expected, tolerance, tolerance, err_msg=f"{step}")


def test_simulation_and_job_make_the_same_plan(jobs):
    real, simulated = (job["lgreco"]["plan"] for job in jobs)
    settings, ratio, *_ = simulated
    assert real[0] == settings
    np.testing.assert_allclose(real[1:], simulated[1:], rtol=1e-3)
    assert settings != [4, 0, 4, 0, 4, 0]  # the own ones of its method
    assert ratio > 1
    assert all(job["top_k"]["plan"] is None for job in jobs)
