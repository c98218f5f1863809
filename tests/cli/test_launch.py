"""Tests the launcher on real processes, which run plain Python to be fast."""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from tf_gradcomp.launch import JobResult, LocalJob, WorkerEnd
from tf_gradcomp.launch.resources import ReservedPorts

PREAMBLE = """
import json, os, signal, subprocess, sys, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
"""
LONG = 300  # seconds, on a busy machine
# Lets a worker leave its id in a folder, and others wait until the worker has ended.
ENDS_OF_OTHERS = """
import os, time

def leave_id(folder):
    os.mkdir(os.path.join(folder, str(os.getpid())))

def wait_for_end(folder):
    while not (ids := os.listdir(folder)):
        time.sleep(0.01)
    while " Z " not in open(f"/proc/{ids[0]}/stat").read():  # the launcher keeps its entry
        time.sleep(0.01)
    time.sleep(0.5)  # so that the launcher sees the end
"""


class Watched:
    """A job that stores its lines, and can wait for a line."""

    def __init__(self, source, workers=2, **settings):
        self.lines = []
        self.job = LocalJob(
            [sys.executable, "-c", PREAMBLE + source],
            workers,
            on_line=lambda index, stream, line: self.lines.append((index, stream, line)),
            **settings,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.job.close()

    def of(self, index):
        return [line for worker, _, line in self.lines if worker == index]

    def wait_for(self, *lines):
        until = time.monotonic() + LONG
        while not all(line in self.of(index) for index, line in lines):
            assert self.job.step(), self.lines
            assert time.monotonic() < until, self.lines


def run(source, workers=2, **settings):
    with Watched(source, workers, **settings) as watched:
        result = watched.job.run()
    return result, watched


def is_alive(pid):
    """Tells whether the process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid):
    until = time.monotonic() + LONG
    while is_alive(pid):
        assert time.monotonic() < until, f"process {pid} still runs"
        time.sleep(0.02)


def test_a_good_job():
    result, watched = run("print('hello', index); print('oh', index, file=sys.stderr)", workers=3)
    assert result.exit_code == 0
    assert result.summary() == []
    assert sorted(end.index for end in result.ends) == [0, 1, 2]
    expected = [(i, s, f"{w} {i}") for i in range(3) for s, w in STREAMS]
    assert sorted(watched.lines) == sorted(expected)


STREAMS = (("stdout", "hello"), ("stderr", "oh"))


def test_each_worker_has_its_tf_config_and_environment():
    result, watched = run(
        "print(os.environ['TF_CONFIG']); print(os.environ['COLOUR'], os.environ.get('HOME'))",
        env={"COLOUR": "red"},
        worker_env=[{}, {"COLOUR": "blue"}],
    )
    assert result.exit_code == 0
    first, second = (eval(watched.of(index)[0]) for index in (0, 1))
    assert first["cluster"] == second["cluster"]
    assert len(set(first["cluster"]["worker"])) == 2
    assert (first["task"]["index"], second["task"]["index"]) == (0, 1)
    assert [watched.of(index)[1] for index in (0, 1)] == ["red None", "blue None"]


def test_a_worker_may_have_its_own_namespace():
    result, watched = run(
        "print(os.environ['TF_CONFIG']); print(os.environ.get('PLACE'))",
        worker_prefix=[["env", "PLACE=attic"], []],
        hosts=["10.0.0.1", "10.0.0.2"],
    )
    assert result.exit_code == 0
    config = eval(watched.of(0)[0])
    hosts = [address.partition(":")[0] for address in config["cluster"]["worker"]]
    assert hosts == ["10.0.0.1", "10.0.0.2"]
    assert [watched.of(index)[1] for index in (0, 1)] == ["attic", "None"]


def test_the_last_words_of_a_killed_worker_are_kept():
    result, watched = run("sys.stdout.write('unfinished'); os.kill(os.getpid(), 9)", workers=1)
    assert watched.of(0) == ["unfinished"]
    assert result.exit_code == 128 + 9


def test_output_left_in_the_pipe_of_an_ended_worker_is_read(monkeypatch):
    monkeypatch.setattr(LocalJob, "_read_output", lambda self, wait: time.sleep(wait))
    result, _ = run("sys.exit('the reason')", workers=1)
    assert result.first_failure.error == "the reason"


def test_one_fails_and_the_others_are_ended():
    source = """
if index == 1:
    raise ValueError("no such luck")
time.sleep(3600)
"""
    result, _ = run(source, workers=3, grace=0.2)
    assert result.exit_code == 1
    first, *others = result.summary()
    assert first.startswith("worker 1 died first, after")
    assert first.endswith("exit code 1: ValueError: no such luck")
    assert sorted(others) == [
        "worker 0 was still running and has been ended.",
        "worker 2 was still running and has been ended.",
    ]


def test_the_others_may_say_in_the_grace_what_they_saw(tmp_path):
    source = f"""{ENDS_OF_OTHERS}
if index == 0:
    leave_id({str(tmp_path)!r})
    sys.exit(7)
wait_for_end({str(tmp_path)!r})
raise RuntimeError("lost worker 0")
"""
    result, _ = run(source, grace=3600)
    assert result.exit_code == 7
    assert "worker 0 died first" in result.summary()[0]
    assert result.summary()[1].startswith("worker 1 followed")
    assert result.summary()[1].endswith("RuntimeError: lost worker 0")


def test_without_grace_the_others_continue(monkeypatch, tmp_path):
    monkeypatch.setattr("tf_gradcomp.launch.processes._DEFAULT_GRACE", 0.0)
    source = f"""{ENDS_OF_OTHERS}
if index == 0:
    leave_id({str(tmp_path)!r})
    sys.exit(1)
wait_for_end({str(tmp_path)!r})
print("end")
"""
    result, watched = run(source, grace=None)
    assert watched.of(1) == ["end"]
    assert [end.returncode for end in result.ends] == [1, 0]


def test_a_worker_that_ends_well_ends_no_other_worker():
    result, watched = run("time.sleep(0.6 * index); print('end')", grace=0)
    assert result.exit_code == 0
    assert watched.of(1) == ["end"]


def test_a_killed_worker_is_named_and_the_others_end_without_a_grace():
    with Watched("print('up'); time.sleep(3600)", grace=3600) as watched:
        watched.wait_for((0, "up"), (1, "up"))
        watched.job.send(1, signal.SIGKILL)
        result = watched.job.run()
    assert result.exit_code == 128 + signal.SIGKILL
    assert "worker 1 died first" in result.summary()[0]
    assert "killed by SIGKILL (not by gradcomp" in result.summary()[0]


DEAF = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up")
while True:
    time.sleep(3600)
"""


def test_stop_interrupts_the_workers():
    source = """
try:
    print("up"); time.sleep(3600)
except KeyboardInterrupt:
    print("saved")
"""
    with Watched(source, grace=3600) as watched:
        watched.wait_for((0, "up"), (1, "up"))
        watched.job.stop()
        result = watched.job.run()
    assert [watched.of(index)[-1] for index in (0, 1)] == ["saved", "saved"]
    assert result.exit_code == 130
    assert result.summary() == ["stopped by SIGINT."]


def test_a_deaf_worker_is_killed_after_the_grace():
    with Watched(DEAF, grace=0.5) as watched:
        watched.wait_for((0, "up"), (1, "up"))
        watched.job.stop(signal.SIGTERM)
        result = watched.job.run()
    assert [end.returncode for end in result.ends] == [-9, -9]
    assert result.exit_code == 128 + signal.SIGTERM


def test_a_second_stop_kills_at_once():
    with Watched(DEAF, grace=3600) as watched:
        watched.wait_for((0, "up"), (1, "up"))
        watched.job.stop()
        watched.job.step()
        watched.job.stop()
        result = watched.job.run()
    assert [end.returncode for end in result.ends] == [-9, -9]


def test_the_time_limit_ends_deaf_and_hearing_workers():
    source = f"""
if index == 0:
    time.sleep(3600)
{DEAF}
"""
    result, watched = run(source, timeout=3, grace=0.3)
    assert watched.job.seconds > 3
    assert result.exit_code == 124
    assert result.summary() == ["the time limit of 3 s was reached; ended workers: 0, 1."]
    assert "KeyboardInterrupt" in watched.of(0)[-1]  # The traceback shows where the process hung.


def test_processes_started_by_a_worker_end_with_the_job():
    source = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(child.pid)
"""
    result, watched = run(source, workers=1)
    assert result.exit_code == 0
    wait_until_dead(int(watched.of(0)[0]))


def test_leaving_the_block_ends_all():
    with Watched("print(os.getpid()); time.sleep(3600)") as watched:
        while not (watched.of(0) and watched.of(1)):
            assert watched.job.step(), watched.lines
    for index in (0, 1):
        assert not is_alive(int(watched.of(index)[0]))
    assert not watched.job.step()  # The job is over, and reports it.
    assert [(end.index, end.returncode) for end in watched.job.ends] == [(0, -9), (1, -9)]
    assert watched.job.result().first_failure is None


def test_no_zombie_and_no_thread_and_no_file_is_left():
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    _, watched = run("print(os.getpid())")
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files
    for index in (0, 1):
        with pytest.raises(ChildProcessError):
            os.waitpid(int(watched.of(index)[0]), os.WNOHANG)


def test_workers_do_not_outlive_a_killed_launcher():
    source = f"""
import sys
sys.path[:] = {sys.path!r}
from tf_gradcomp.launch import LocalJob
program = "import os, time; print(os.getpid()); time.sleep(3600)"
with LocalJob([sys.executable, "-c", program], 2, on_line=lambda *line: print(line[2])) as job:
    job.run()
"""
    with Watched(source, workers=1) as launcher:
        while len(launcher.of(0)) < 2:
            assert launcher.job.step(), launcher.lines
        pids = [int(line) for line in launcher.of(0)]
        # The workers are in separate process groups, which this signal does not reach.
        assert all(is_alive(pid) for pid in pids)
        launcher.job.send(0, signal.SIGKILL)
        for pid in pids:
            wait_until_dead(pid)


def test_only_a_server_that_asks_for_it_gets_a_reserved_port():
    ports = ReservedPorts(["localhost"] * 50)
    try:
        values = [int(address.rpartition(":")[2]) for address in ports.addresses]
        assert len(set(values)) == 50
        with socket.create_server(("", values[0])) as server:  # Sets SO_REUSEADDR, like gRPC.
            client = socket.create_connection(("localhost", values[0]), timeout=5)
            server.accept()[0].close()
            client.close()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", values[1]))
    finally:
        ports.release()
    with socket.socket() as other:
        other.bind(("", values[1]))


def end(returncode, *stderr, index=0, **kwargs):
    return WorkerEnd(index, returncode, 1.0, stderr_tail=stderr, **kwargs)


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ((), ""),
        (("one", "two", ""), "two"),
        (("I0000 00:00:1 1 a.cc:1] fine", "W0000 00:00:1 1 a.cc:1] hm"), ""),
        (("F0000 00:00:1 1 a.cc:1] Check failed", "*** stack ***", "@ 0x1"), "Check failed"),
        (("Fatal Python error: Segmentation fault", "", "Thread 1"), "Segmentation fault"),
        (
            ("Traceback (most recent call last):", "  File x", "KeyError: 1", "", "W0000 bye"),
            "KeyError: 1",
        ),
        (
            (
                *("Traceback (most recent call last):", "  File x", "KeyError: 1", ""),
                *("During handling of the above exception, ...", ""),
                *("Traceback (most recent call last):", "  File y", "OSError: 2", "more"),
            ),
            "OSError: 2",
        ),
        (
            (
                *(
                    "Traceback (most recent call last):",
                    "UnavailableError: Graph execution error:",
                    "",
                ),
                *("Detected at node A defined at:", "  File x", "", "Worker 1 is lost", "bye"),
            ),
            "UnavailableError: Graph execution error: Worker 1 is lost",
        ),
        (
            (
                *(
                    "Traceback (most recent call last):",
                    "  File x",
                    "    f(x)",
                    "^^^^",
                    "KeyError: 1",
                ),
            ),
            "KeyError: 1",
        ),
        (
            (
                *("Traceback (most recent call last):", "  File x"),
                *("ValueError: Exception encountered when calling Cond.call().", ""),
                *("Too wide", "", "Arguments received by Cond.call():"),
            ),
            "ValueError: Exception encountered when calling Cond.call(). Too wide",
        ),
        (
            (
                *("Traceback (most recent call last):", "  File x", "ValueError: in user code:"),
                *("", "    File y", "    ValueError: odd shape", "    ", "W0000 bye"),
            ),
            "ValueError: in user code: ValueError: odd shape",
        ),
    ],
)
def test_the_error_is_found_in_the_last_lines(lines, error):
    assert end(1, *lines).error.endswith(error)
    assert bool(end(1, *lines).error) == bool(error)


def test_a_rank_that_horovod_has_left_is_not_the_first_that_failed():
    lost = WorkerEnd(0, 1, 1.0, stderr_tail=("UnknownError: Horovod has been shut down. Why",))
    reason = WorkerEnd(1, 3, 1.2, stderr_tail=("ValueError: the reason",))
    assert JobResult((lost, reason)).first_failure is reason
    assert JobResult((lost, reason)).exit_code == 3
    assert JobResult((lost,)).first_failure is lost


LOST = "UnavailableError: Collective ops is aborted by: Socket closed"


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([end(0, index=1), end(1, LOST)], ["worker 1 left first", "worker 0 died, after"]),
        # This worker ended well, and the other worker failed for a separate reason.
        ([end(0, index=1), end(1, "OSError: x")], ["worker 0 died first", "worker 1 ended well"]),
        ([end(1, LOST), end(0, index=1)], ["worker 0 died first", "worker 1 ended well"]),
        ([end(1, LOST), end(1, "OSError", index=1)], ["worker 1 died first", "worker 0 followed"]),
        (
            [end(1, "a 1"), end(1, "a 2", index=1), end(1, "b", index=2)],
            ["worker 0 died first", "worker 1 followed, with the same error.", "worker 2 followed"],
        ),
        ([end(1, "a 1"), end(1, "a 2", index=1)], ["all workers died with the same error"]),
        ([end(1, "a"), end(2, "a", index=1)], ["worker 0 died first", "worker 1 followed, after"]),
    ],
)
def test_the_worker_that_caused_the_failure_is_named(ends, words):
    lines = JobResult(tuple(ends)).summary()
    assert len(lines) == len(words)
    for line, beginning in zip(lines, words, strict=True):
        assert line.startswith(beginning)


def test_the_time_limit_names_workers_that_had_left():
    late = end(-2, index=0, ended_by_launcher=True)
    lines = JobResult((end(0, index=1), late), timed_out=9.0).summary()
    assert lines[0] == "the time limit of 9 s was reached; ended workers: 0."
    assert lines[1].startswith(
        "worker 1 had left after 1.0 s, exit code 0. If the other workers waited"
    )


def test_exit_codes_and_their_order():
    assert JobResult((end(0), end(3), end(-11))).exit_code == 3
    assert JobResult((end(-11),)).exit_code == 139
    assert end(-11).how == "killed by SIGSEGV"
    assert end(-40).how == "killed by signal 40"
    ended = end(-9, ended_by_launcher=True)
    assert JobResult((ended,), stop_signal=15).exit_code == 143
    assert JobResult((ended,), timed_out=3.0).exit_code == 124
    assert JobResult((end(3), ended), stop_signal=2).exit_code == 3
