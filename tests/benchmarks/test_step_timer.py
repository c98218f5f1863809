"""Tests the times of steps that the programs log."""

import math
import runpy
import types
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "programs"


@pytest.fixture
def timed(monkeypatch):
    """Returns the logs of an epoch whose steps end at the given seconds."""
    timer = runpy.run_path(str(PROGRAMS / "common.py"))["StepTimer"]()
    names = timer.on_epoch_end.__globals__

    def log(ends):
        clock = iter(ends)
        # Other threads read the real clock, so only the example's name is replaced.
        monkeypatch.setitem(names, "time", types.SimpleNamespace(perf_counter=clock.__next__))
        logs = {}
        timer.on_epoch_begin(0)
        for batch in range(len(ends)):
            timer.on_train_batch_begin(batch)
            timer.on_train_batch_end(batch)
        timer.on_epoch_end(0, logs)
        return logs["seconds_per_step"]

    return log


def test_seconds_per_step_count_waiting_between_steps_and_leave_the_first_out(timed):
    # Two processes that take turns on a core: two short steps, then a wait as long.
    assert timed([60.0, 61.0, 62.0, 65.0, 66.0, 67.0, 70.0]) == pytest.approx(10 / 6)


def test_epochs_are_timed_separately_and_an_epoch_of_one_step_has_no_figure(timed):
    assert timed([5.0, 7.0]) == 2.0
    assert math.isnan(timed([100.0]))
