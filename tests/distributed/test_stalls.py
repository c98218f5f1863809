"""Tests reports of late workers; `test_pauses.py` tests workers that do not answer."""

import re
from pathlib import Path

import pytest

from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs/stalls.py"
WAYS = {  # to train, by the number of replicas in a worker
    1: ["start", "fit", "executions", "dense", "rounds", "loop"],
    2: ["fit", "dense"],
}
AFTER = "1.5"  # seconds


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.oldest), 2])
def stalls(request, tmp_path_factory):
    """Returns the first report in each way to train, and both workers."""
    folder = tmp_path_factory.mktemp("stalls")
    late, reports = [], {}

    def hear(worker, line):
        if line.startswith("late: "):
            late.append(line.removeprefix("late: "))
        elif "has not arrived" in line and late:
            (folder / late[-1]).touch()
            reports.setdefault(late[-1], (worker, line))

    env = {"GRADCOMP_STALL_AFTER": AFTER}
    ways = WAYS[request.param]
    workers = run_workers(PROGRAM, 2, [folder, request.param, *ways], env=env, on_line=hear)
    assert [*reports] == ways
    return reports, workers


def test_the_worker_that_waits_names_the_one_that_is_late(stalls):
    for way, (reporter, line) in stalls[0].items():
        assert reporter == 0
        where = "before the first step" if way == "start" else r"in step \d+"
        late = rf"Worker 1 \(localhost:\d+\) has not arrived: it runs, {where}\."
        assert re.search(rf"tf_gradcomp: Waiting for {AFTER} seconds, {where}\. {late}$", line), way


def test_workers_count_their_steps_and_collectives_alike(stalls):
    first, second = map(result, stalls[1])
    assert first == second
    assert first[0] % 2 == 0


def test_the_end_of_a_wait_is_reported(stalls):
    # After the last one, the program ends before it is.
    assert stalls[1][0].stderr.count("Continues after") >= len(stalls[0]) - 1
