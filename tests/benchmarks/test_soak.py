"""The soak test, for some seconds, and that it sees what it looks for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import soak
from memory_growth import RECORD

from tests.benchmarks.conftest import BENCHMARKS
from tests.workers import ONE_THREAD, PYTHON, result, run_workers, server

GRADCOMP = [*PYTHON, str(Path(sys.executable).with_name("gradcomp"))]


def test_nothing_is_lost_when_workers_are_killed():
    plan = soak.Plan(minutes=0.1, kills=2, seed=2, workers=2)
    found = soak.soak(plan, GRADCOMP, {**ONE_THREAD, "PRELOADED": server(0)})
    print(soak.markdown(plan, found))
    assert found.faults == []
    assert found.kills == found.restarts == 2
    assert found.checks >= found.epochs > 0


LOSES = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import conserved
from tf_gradcomp.exchange.exchange import GradientExchange

whole = GradientExchange.residuals.fget
GradientExchange.residuals = property(lambda self: [0.5 * total for total in whole(self)])
conserved.main()
"""


def test_a_lost_gradient_is_seen(tmp_path):
    workers = run_workers(LOSES, 2, [tmp_path], check=False)
    for worker in workers:
        assert worker.returncode == 1
        assert "AssertionError: after 1 epochs: lost=[" in worker.stderr
    log = soak.Log(tmp_path)
    log.read()
    assert log.problem


GATHERS = """
import ctypes
import tf_gradcomp as gc
from tests.ranks import report

NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks used fordblks keepcost".split()

class Allocated(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]

allocated = ctypes.CDLL(None).mallinfo2
allocated.restype = Allocated
strategy = gc.MultiWorkerMirroredStrategy(stall_after=0)

def used_after(gathers):
    for _ in range(gathers):
        strategy.group.processes.largest([1.0])
    return allocated().used

before = used_after(100)
report((used_after(400) - before) / 400)
"""


def test_tensorflow_keeps_a_record_of_each_collective():
    for worker in run_workers(GATHERS):
        assert result(worker) == pytest.approx(RECORD, rel=0.2)  # besides a growing table


def test_a_resume_before_the_last_save_is_seen():
    found = soak.Found(kills=1)
    lines = [{"resumed": 0}, {"saved": 1}, {"saved": 2}, {"resumed": 1}, {"saved": 2}]
    soak._judge_log(found, lines)
    assert found.faults == ["resumed at epoch 1, although 2 were saved"]
    assert (found.epochs, found.checks) == (2, 5)


def test_a_worker_whose_number_another_process_has_is_not_watched(tmp_path):
    log, processes = soak.Log(tmp_path), soak.Processes(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        log.take({"worker": 1, "pid": worker.pid})
        processes.sample(1.0, log)  # before the first epoch has ended
        log.take({"worker": 1, "collectives": 60})
        for second in (2.0, 3.0):
            processes.sample(second, log)
        assert processes.left() == [worker.pid]
        log.pids.clear()  # as after a kill, although the number is still there
        processes.sample(4.0, log)
        worker.kill()
    assert processes.left() == []
    processes.close()
    launcher, samples = processes.samples
    assert launcher.times == [1.0, 2.0, 3.0, 4.0]
    assert (samples.kind, samples.times) == ("worker 1", [2.0, 3.0])
    assert samples.records == [60 * RECORD / 2**20] * 2


@pytest.mark.parametrize("saves", [False, True])
def test_a_second_kill_waits_for_a_save(monkeypatch, saves):
    monkeypatch.setattr(soak.os, "kill", lambda pid, signum: None)
    log, killer = soak.Log(Path("nowhere")), soak.Killer(soak.Plan(1.0, kills=3, seed=0, workers=2))
    for run in range(3):
        for worker in range(2):
            log.take({"worker": worker, "pid": 10 * run + worker})
        if saves:
            log.take({"saved": run + 1})
        killer.look(60.0, log)
    assert killer.killed == (3 if saves else 1)


def test_no_process_is_killed_in_the_half_in_which_memory_is_judged():
    plan = soak.Plan(minutes=120, kills=30, seed=0, workers=2)
    assert 0 <= min(soak.Killer(plan)._times) < max(soak.Killer(plan)._times) <= plan.half == 3600
