"""The arithmetic of the costs of faults, and a short job whose worker is killed."""

import fault_jobs
import faults
import faults_report as report
import pytest
from faults_report import Pace

from tests.benchmarks.test_soak import GRADCOMP
from tests.workers import ONE_THREAD, server


def step(at, number, worker=0):
    return {"worker": worker, "at": at, "step": number}


def mark(at, name, worker):
    return {"worker": worker, "at": at, "mark": name}


KILLED = 10.0
MARKS = {"started": 13.0, "imported": 20.0, "built": 22.0, "restored": 22.5}
SAID = [
    (1.0, "gradcomp: starting 2 workers"),
    (12.0, "gradcomp: worker 1 died first, after 9.5 s: killed by SIGKILL."),
    (12.0, "gradcomp: restart 1 of 3."),
    (12.5, "gradcomp: starting 2 workers"),
]


@pytest.fixture
def lines():
    """The log of a job that has saved after step 60, and is killed after step 75."""
    found = [mark(2.0, "started", 0), mark(2.0, "started", 1)]
    for worker in range(2):
        found += [step(0.1 * number, number, worker) for number in range(50, 76)]
    found.append(step(10.05, 76))  # the surviving worker's step after the kill does not count
    for worker, delay in enumerate((0.0, 0.5)):
        found += [mark(at + delay, name, worker) for name, at in MARKS.items()]
        found.append(step(25.0 + delay, 61, worker))
    return [*found, step(25.1, 62)]


def test_the_time_of_a_restart_is_split_where_the_last_worker_is_done(lines):
    split = report.parts(lines, SAID, KILLED)
    assert split == {
        "detection": pytest.approx(0.5),
        "end of the others": pytest.approx(1.5),
        "start": pytest.approx(1.5),
        "import": pytest.approx(7.0),
        "build": pytest.approx(2.0),
        "restore": pytest.approx(0.5),
        "trace and first step": pytest.approx(2.5),
    }
    assert sum(split.values()) == pytest.approx(25.5 - KILLED)


def test_a_second_restart_is_not_mixed_with_the_first(lines):
    later = [{**line, "at": line["at"] + 100} for line in lines]
    said = [*SAID, *((at + 100, text) for at, text in SAID[1:])]
    said[3] = (102.0 - 1.0, said[3][1])  # the start of the run that is killed at 110
    assert report.parts([*lines, *later], said, KILLED + 100)["import"] == pytest.approx(7.0)


def test_steps_since_the_last_save_are_lost(lines):
    assert report.lost_steps(lines, KILLED) == 15


def test_saves_do_not_count_in_the_time_of_a_step():
    lines = [step(1.0, 10), step(2.0, 20), {"worker": 0, "at": 5.0, "saved": 20, "seconds": 3.0}]
    lines += [step(9.0, 21, worker=1), step(6.0, 30)]
    pace = report.pace(lines)
    assert (pace.step, pace.save) == (pytest.approx(0.1), 3.0)
    assert pace.with_saves(10) == pytest.approx(0.4)


def test_the_share_of_steps_kept_counts_the_outage_the_lost_steps_and_the_saves():
    free = Pace(step=0.1, save=0.0)
    assert report.share(100, 0, 0, free, 10) == pytest.approx(1)
    assert report.share(100, 20, 0, free, 10) == pytest.approx(0.8)
    assert report.share(100, 20, 50, free, 10) == pytest.approx(0.75)
    # A save as long as ten steps after each ten steps doubles the time of each step.
    assert report.share(100, 20, 50, Pace(step=0.1, save=1.0), 10) == pytest.approx(0.35)
    assert report.share(10, 20, 0, free, 10) == 0
    assert report.share(100, 20, 400, free, 800) > 0
    assert report.share(100, 20, 400, free, 801) == 0  # no save is ever reached


def test_a_computed_share_loses_half_of_the_steps_between_two_saves():
    record = {"step": 0.1, "save": 0.0, "seconds": [18.0, 22.0]}
    assert report.computed_share(record, every=100 / 60, interval=100) == pytest.approx(0.75)


def test_the_longest_gap_may_begin_before_the_fault():
    lines = [step(1.0, 1, 1), step(1.1, 2, 1), step(21.4, 3, 1), step(21.5, 4, 1), step(60.0, 9)]
    assert report.longest_gap(lines, 1, since=1.3) == pytest.approx(20.3)


def test_a_killed_job_is_measured(monkeypatch):
    for name, value in {**ONE_THREAD, "PRELOADED": server(0)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fault_jobs, "GRADCOMP", GRADCOMP)
    task = fault_jobs.Task("digits_cnn", (), epoch=40, often=10)
    record = faults.measure_restarts(task, kills=1)
    assert min(record["parts"].values()) >= 0
    assert 0 <= record["lost"][0] <= 10
    assert record["step"] > 0
    assert record["save"] > 0
