"""Tests jobs that resume with other local steps than the job that saved within a round."""

from pathlib import Path

import numpy as np
import pytest

from tests.distributed.local_learners import RATE, SHAPES, assert_equal, gradients
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "local_schedules.py"
BEFORE, AFTER = gradients(4), gradients(6, seed=5)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedules")
    return [result(worker) for worker in run_workers(PROGRAM, 2, [folder])]


def moved(*parts):
    """Returns how far plain SGD moves the weights in some steps."""
    steps = [step for part in parts for step in part]
    return [
        RATE * sum(g[i] for worker_gradients in steps for g in worker_gradients) for i in range(2)
    ]


def whole(workers, unit=1.0):
    """Returns the weights if no worker had a residual, whose unit is given."""
    waits = [sum(np.float32(worker["residuals"][i]) for worker in workers) for i in range(2)]
    assert np.any(waits[0])
    values = [np.float32(value) for value in workers[0]["values"]]
    return [
        value - unit * waiting_value for value, waiting_value in zip(values, waits, strict=True)
    ]


# The exchanges: of the save, and of the six steps that follow.
@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "exchanges"),
    [
        ("rounds", "longer", 2 + 2),  # a round of five steps, and one that ends early
        ("rounds", "warm-up", 2 + 2),  # no warm-up comes after the first round
        ("synchronous", "rounds", 4 + 2),
        ("synchronous", "warm-up", 4 + 2 + 2),  # two synchronous steps are left
    ],
)
def test_nothing_is_lost_where_the_schedule_changes(jobs, saved_by, resumed_by, exchanges):
    seen = [job["by_schedule"] for job in jobs]
    unit = 1.0 if saved_by == "rounds" else RATE
    assert_equal(whole([one[saved_by] for one in seen], unit), [-one for one in moved(BEFORE)])
    end = [one[f"of {saved_by}"][resumed_by] for one in seen]
    assert end[0]["values"] == end[1]["values"]
    assert exchanges == end[0]["exchanges"]
    assert_equal(whole(end), [-one for one in moved(BEFORE, AFTER)])


@pytest.mark.parametrize(
    ("name", "momentum"), [("none", None), ("plain", 0.0), ("less momentum", 0.25)]
)
def test_an_outer_optimizer_continues_with_what_it_can_use(jobs, name, momentum):
    values, velocity = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    # Before the save: rounds of three steps and, ended early, of one, by Nesterov's momentum.
    values, velocity = nesterov(values, velocity, 0.5, BEFORE[:3], BEFORE[3:])
    for job in jobs:
        assert_equal(job["by_outer"]["saved"]["values"], values)
    if momentum is None:
        values = [value - step for value, step in zip(values, moved(AFTER), strict=True)]
    else:
        if momentum == 0:
            velocity = [np.zeros(shape) for shape in SHAPES]
        values, _ = nesterov(values, velocity, momentum, AFTER[:3], AFTER[3:])
    for job in jobs:
        assert_equal(job["by_outer"]["resumed"][name]["values"], values)


def test_after_a_synchronous_job_local_steps_continue_the_schedule_with_new_momentum(jobs):
    zeros = [np.zeros(shape) for shape in SHAPES]
    # Rounds of three steps and, ended early by the save, of one; then two synchronous steps.
    first, _ = nesterov(zeros, zeros, 0.5, BEFORE[:3], BEFORE[3:])
    second = [one - step for one, step in zip(first, moved(AFTER[:2]), strict=True)]
    # Six steps are done, so the warm-up is over, and rounds have three steps.
    third, _ = nesterov(second, zeros, 0.5, AFTER[2:5], AFTER[5:])
    for job in jobs:
        seen = job["synchronous_between"]
        for one, expected in zip(seen, (first, second, third), strict=True):
            assert_equal(one["values"], expected)
        assert [one["exchanges"] for one in seen] == [2, 2 + 2, 2 + 2 + 2]


def nesterov(values, velocity, momentum, *rounds):
    """Returns weights and velocity after rounds, by SGD(0.5, momentum, nesterov=True)."""
    for steps in rounds:
        change = moved(steps)
        velocity = [momentum * v - 0.5 * one for v, one in zip(velocity, change, strict=True)]
        ahead = [momentum * v - 0.5 * one for v, one in zip(velocity, change, strict=True)]
        values = [one + step for one, step in zip(values, ahead, strict=True)]
    return values, velocity


def test_the_state_of_another_class_of_outer_optimizer_is_refused(jobs):
    for job in jobs:
        seen = job["by_outer"]
        for error in (*(seen["resumed"][name] for name in ("adagrad", "adam")), seen["by_keras"]):
            assert "state of an outer optimizer of another class than" in error
