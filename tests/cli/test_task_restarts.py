"""`gradcomp run --max-restarts` under `srun` and `mpirun`: all tasks restart their workers."""

import concurrent.futures
import contextlib
import fcntl
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.cli.test_restarts import START, TRAINING
from tests.cli.test_run import COMMAND, ENV, preloaded_gradcomp, program  # noqa: F401
from tests.cli.test_scheduler import mpirun
from tests.workers import PYTHON, server
from tf_gradcomp.launch import Tasks
from tf_gradcomp.launch.ports import ReservedPorts
from tf_gradcomp.launch.scheduler import slurm_addresses
from tf_gradcomp.launch.tasks import Told

FAILS_ONCE = "sys.exit(7 if runs == 0 and index == 1 else 0)"
LOSES_ITS_TASK = """
import signal
size = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
if runs == 0 and index == int(sys.argv[2]):
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60 if size == 3 else 0)
print("ran with", size)
"""
PRELOADED = [*PYTHON, str(Path(sys.executable).with_name("gradcomp"))]


@pytest.fixture
def step():
    """Plays a job step of Slurm's on this machine: starts all tasks, and returns their ends."""
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(free_job())

        def srun(size, *args, command=COMMAND, env=None):
            tasks = []
            for rank in range(size):
                place = ENV | (env or {}) | variables(job, rank, size)
                task = subprocess.Popen(
                    [*command, "run", "--json", *args],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=place,
                )
                stack.callback(task.kill)
                tasks.append(task)
            said = [task.communicate(timeout=200) for task in tasks]
            return [
                subprocess.CompletedProcess(task.args, task.returncode, *texts)
                for task, texts in zip(tasks, said, strict=True)
            ]

        yield srun


def variables(job, rank, size):
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
    }


@contextlib.contextmanager
def free_job():
    """The number of a job whose ports no other program, and no other test, has."""
    for job in itertools.count(os.getpid()):
        first = int(slurm_addresses(variables(job, 0, 3))[0].rpartition(":")[2])
        with open(Path(tempfile.gettempdir(), f"gradcomp-test-{first}"), "w") as lock:
            if are_free(range(first, first + 4), lock):
                yield job
                return


def are_free(ports, lock):
    with contextlib.ExitStack() as stack:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for port in ports:
                stack.enter_context(socket.create_server(("", port)))
        except OSError:
            return False
    return True


def test_tasks_restart_together_and_the_first_one_tells(step, program, tmp_path):  # noqa: F811
    first, second = step(2, "--max-restarts", "5", program(START + FAILS_ONCE), str(tmp_path))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert json.loads(first.stdout)["runs"] == [
        {"slots": [0, 1], "exit_code": 7, "first_failure": 1},
        {"slots": [0, 1], "exit_code": 0, "first_failure": None},
    ]
    assert "gradcomp: worker 1 died first" in first.stderr
    assert "gradcomp: restart 1 of 5, from zero: nothing has been saved.\n" in first.stderr
    assert (second.stdout, second.stderr) == ("", "")


def test_two_runs_without_a_save_end_all_tasks_with_the_first_reason(step, program, tmp_path):  # noqa: F811
    body = START + "if index == 1: sys.exit(10 + runs)\ntime.sleep(60)"
    options = ["--max-restarts", "9", "--grace", "0.2"]
    ended = step(3, *options, program(body), str(tmp_path))
    assert [task.returncode for task in ended] == [10, 10, 10], ended[0].stderr
    assert json.loads(ended[0].stdout)["restarts"] == 1
    assert "two runs died without a save between them" in ended[0].stderr


def test_all_tasks_know_that_one_has_saved(step, program, tmp_path):  # noqa: F811
    body = START + (
        "print(index, runs, os.environ.get('GRADCOMP_SAVED'), file=sys.stderr)\n"
        "save() if index == 1 else None\n"
        "sys.exit(3)"
    )
    ended = step(2, "--max-restarts", "2", program(body), str(tmp_path))
    assert [task.returncode for task in ended] == [3, 3]
    assert json.loads(ended[0].stdout)["restarts"] == 2
    assert "gradcomp: --max-restarts allows only 2.\n" in ended[0].stderr
    for rank, task in enumerate(ended):
        said = [line for line in task.stderr.splitlines() if line.startswith("[worker")]
        expected = [f"{rank} 0 None", f"{rank} 1 1", f"{rank} 2 1"]
        assert said == [f"[worker {rank}] {line}" for line in expected]


def test_a_lost_task_ends_the_job(step, program, tmp_path):  # noqa: F811
    options = ["--max-restarts", "9", "--grace", "0.2"]
    first, lost, third = step(3, *options, program(START + LOSES_ITS_TASK), str(tmp_path), "1")
    assert (first.returncode, lost.returncode, third.returncode) == (255, -9, 255)
    gone = "rank 1: its gradcomp run has ended or cannot be reached"
    assert "gradcomp: worker 1 died first" in first.stderr
    assert f"exit code 255: {gone}\n" in first.stderr
    assert f"gradcomp: no worker can be started on {gone}" in first.stderr
    assert "no restart: 2 of 3 workers could start, and the job needs 3." in first.stderr


def test_without_a_lost_task_the_others_continue(step, program, tmp_path):  # noqa: F811
    options = ["--max-restarts", "9", "--min-workers", "2", "--grace", "0.2"]
    first, _, third = step(3, *options, program(START + LOSES_ITS_TASK), str(tmp_path), "1")
    assert (first.returncode, third.returncode) == (0, 0), first.stderr
    assert [run["slots"] for run in json.loads(first.stdout)["runs"]] == [[0, 1, 2], [0, 2]]
    assert "[worker 0] ran with 2" in first.stderr
    assert "[worker 1] ran with 2" in third.stderr


def test_without_the_first_task_all_end(step, program, tmp_path):  # noqa: F811
    options = ["--max-restarts", "9", "--min-workers", "1", "--grace", "0.2"]
    _, second, third = step(3, *options, program(START + LOSES_ITS_TASK), str(tmp_path), "0")
    for task in (second, third):
        assert task.returncode == 1
        assert "Lost rank 0, which leads restarts" in task.stderr


def test_a_worker_that_dies_at_once_is_left_out(step, program, tmp_path):  # noqa: F811
    body = START + (
        "size = len(json.loads(os.environ['TF_CONFIG'])['cluster']['worker'])\n"
        "if size == 3: sys.exit(3) if index == 0 else time.sleep(60)\n"
        "print('now', index, 'of', size)"
    )
    options = ["--max-restarts", "9", "--min-workers", "2", "--grace", "0.2"]
    ended = step(3, *options, program(body), str(tmp_path))
    assert [task.returncode for task in ended] == [0, 0, 0], ended[0].stderr
    slots = [run["slots"] for run in json.loads(ended[0].stdout)["runs"]]
    assert slots == [[0, 1, 2], [0, 1, 2], [1, 2]]
    assert "now" not in ended[0].stderr
    assert "[worker 0] now 0 of 2" in ended[1].stderr
    assert "[worker 1] now 1 of 2" in ended[2].stderr


def test_restarted_tasks_train_as_a_job_whose_workers_live(step, program, tmp_path):  # noqa: F811
    path = program(TRAINING)
    for folder in ("died", "lived"):
        (tmp_path / folder).mkdir()
    options = ["--max-restarts", "1", "--output", "chief"]
    died = step(
        2,
        *options,
        path,
        str(tmp_path / "died"),
        "dies",
        "saves",
        command=PRELOADED,
        env={"PRELOADED": server(0)},
    )
    assert [task.returncode for task in died] == [0, 0], died[0].stderr + died[1].stderr
    assert "worker 1 died first" in died[0].stderr
    assert "restart 1 of 1.\n" in died[0].stderr
    lived = preloaded_gradcomp("run", "-n", "2", path, str(tmp_path / "lived"), "lives", "saves")
    assert lived.returncode == 0, lived.stderr
    weights = [line for line in died[0].stderr.splitlines() if line.startswith("[worker 0] [[")]
    assert weights == [line for line in lived.stdout.splitlines() if line.startswith("[worker 0]")]


def test_mpirun_keeps_a_job_whose_workers_are_restarted(program, tmp_path):  # noqa: F811
    done = mpirun("run", "--max-restarts", "2", program(START + FAILS_ONCE), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "gradcomp: restart 1 of 2, from zero: nothing has been saved.\n" in done.stderr


@pytest.fixture
def meeting():
    """A free address on this machine."""
    reserved = ReservedPorts(["localhost"])
    yield reserved.addresses[0]
    reserved.release()


def agree(*tasks):
    """Has all tasks tell their number, and returns what they all heard."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        heard = [pool.submit(task.exchange, number) for number, task in enumerate(tasks)]
        first, *others = [one.result(60) for one in heard]
    assert all(other == first for other in others)
    return first


def test_strangers_do_not_disturb_the_tasks(meeting):
    place = "localhost", int(meeting.rpartition(":")[2])
    first = Tasks(0, 2, meeting, "job", wait=60)
    with contextlib.ExitStack() as stack:
        for said in (b"", b"\xff\n", b"\0\0\0\x40half"):  # they stay connected, and wait
            stranger = stack.enter_context(socket.create_connection(place, 60))
            stranger.sendall(said)
        for said in (b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\1x", bytes(100)):
            with socket.create_connection(place, 60) as stranger:
                stranger.sendall(said)
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(100):
                        pass
        with pytest.raises(RuntimeError, match="another job or another program listens there"):
            Tasks(1, 2, meeting, "other", wait=60)
        second = Tasks(1, 2, meeting, "job", wait=60)
        for _ in range(2):
            told = agree(first, second)
            assert (dict(told.values), told.lost) == ({0: 0, 1: 1}, {})
            Tasks(1, 2, meeting, "job", wait=60)  # a rank that is known is a stranger


def test_a_failure_is_known_before_all_have_told_theirs(meeting):
    first, second, third = (Tasks(rank, 3, meeting, "job", wait=60) for rank in range(3))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waits = pool.submit(second.exchange, "failed", failed=True)
        for task in (first, third):
            while task.failed() != {1}:
                time.sleep(0.01)
        others = [pool.submit(task.exchange, "ended") for task in (first, third)]
        assert waits.result(60) == others[0].result(60) == others[1].result(60)
    assert first.failed() == third.failed() == set()


def test_a_task_that_never_connects_is_lost(meeting):
    first = Tasks(0, 2, meeting, "job", wait=5)
    late = {1: "it did not connect within 5 seconds"}
    assert first.exchange("value") == Told({0: "value"}, late)


def test_a_program_that_says_nothing_is_not_waited_for(meeting, monkeypatch):
    monkeypatch.setattr("tf_gradcomp.launch.tasks._SILENCE", 1)
    with (
        socket.create_server(("localhost", int(meeting.rpartition(":")[2]))),
        pytest.raises(RuntimeError, match=r"Rank 1 .* another program listens there"),
    ):
        Tasks(1, 2, meeting, "job", wait=60)


def test_tasks_meet_by_ipv6(meeting):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    port = meeting.rpartition(":")[2]
    first, second = (Tasks(rank, 2, f"[::1]:{port}", "job", wait=60) for rank in range(2))
    assert agree(first, second).lost == {}
