"""Real worker processes for tests.

A test gives a program, as text or as a file, and gets what each worker printed and reported:

    from tests.workers import results, run_workers

    def test_sum():
        workers = run_workers('''
            import json, os
            import tensorflow as tf

            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            ...
            with open(os.environ["RESULT_PATH"] + ".json", "w") as file:
                json.dump({"loss": 0.5}, file)
        ''', n=2)
        first, second = results(workers)
        assert first == second

A longer program is the file of its tests itself. So editors and lint see it, and the tests use its
constants:

    PROGRAM = Path(__file__)  # each worker runs this file

    def train():
        ...

    def test_workers_train_alike():
        first, second = results(run_workers(PROGRAM, 2, ["adacomp"]))
        assert first == second

    if __name__ == "__main__":
        METHOD = argument(1)
        report(train())

A worker reports by writing either `RESULT_PATH + ".json"` or `RESULT_PATH + ".npz"` (which is
what `np.savez(os.environ["RESULT_PATH"], weights=...)` does); each worker has its own RESULT_PATH.

Faults need a hand on the running job:

    with Job(PROGRAM, n=2) as job:
        job.wait_for_line(1, "epoch 1", timeout=60)
        job.kill(1)
        survivor = job.wait()[0]
    assert "UnavailableError" in survivor.stderr

Loading TensorFlow takes longer than most programs. `tests/preloaded.py` therefore forks workers
from one of two processes that have loaded TensorFlow: workers with an even index from the first
process, and workers with an odd index from the second. The two kinds hash strings in different
ways, like workers of a real job.

Nothing outlives its deadline: then all processes are killed, and the test fails with the last
output of every worker. When all is well, nothing is printed.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tf_gradcomp
from tests import preloaded
from tf_gradcomp.launch import LocalJob

PYTHON = (sys.executable, "-I", "-S", preloaded.__file__)  # needs `server` in the environment

ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1"}  # for an op; workers share few cores
OPTIMIZED = {preloaded.OPTIMIZE_GRAPHS: "1"}  # runs graphs as users do
# Horovod's ranks talk in each cycle, even when they have nothing to exchange.
_LONG_CYCLES = {"HOROVOD_CYCLE_TIME": "3"}  # milliseconds, instead of 1
# The tests of lost workers would take longer with the library's own timeout.
_SOON = {"GRADCOMP_HEARTBEAT_TIMEOUT": "10"}
_SERVERS = 2
_TAIL_LINES = 40
# Longer than TensorFlow needs to notice a lost worker, so that its error is seen as well.
_GRACE = 15.0
_NOTHING = object()

OnLine = Callable[[int, str], None]


@dataclass(frozen=True)
class WorkerResult:
    """The end and the output of a worker; `returncode` is minus the number of a signal."""

    index: int
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    reported: Any = _NOTHING


def result(worker: WorkerResult) -> Any:
    """Returns the worker's report: the JSON value, or a dict of arrays for an npz file."""
    assert worker.reported is not _NOTHING, (
        f"worker {worker.index} reported nothing (exit code {worker.returncode})\n{worker.stderr}"
    )
    return worker.reported


def results(workers: Sequence[WorkerResult]) -> list[Any]:
    """Returns the report of each worker."""
    return [result(worker) for worker in workers]


def run_workers(
    program: str | Path,
    n: int = 2,
    args: Sequence[object] = (),
    deadline: float = 540,
    env: Mapping[str, str] | None = None,
    per_worker_env: Sequence[Mapping[str, str]] | None = None,
    *,
    check: bool = True,
    on_line: OnLine | None = None,
) -> list[WorkerResult]:
    """Runs a program on `n` worker processes to its end.

    Args:
        program: The program's source (indentation is removed) or the path of its file.
        n: How many workers.
        args: The program's arguments.
        deadline: Seconds after which everything is killed and the test fails.
        env: Environment variables for all workers, in addition to this process's.
        per_worker_env: Environment for each worker.
        check: Whether a worker that fails makes the test fail, and ends the others soon. Without,
            all workers may run on to the deadline.
        on_line: Called with the worker's index and each line it prints.

    Returns:
        One result for each worker, in the order of their indices.

    Raises:
        AssertionError: If the deadline passes, or (with `check`) a worker fails.
    """
    grace = _GRACE if check else None
    with Job(program, n, args, deadline, env, per_worker_env, on_line=on_line, grace=grace) as job:
        workers = job.wait()
        if check:
            job.check()
    return workers


class Job:
    """Running workers; takes the arguments of `run_workers`. Use it as a context manager.

    The workers' pipes are read only while a method of the job waits.

    Args:
        grace: Seconds after which the others are killed when one worker fails; `None`: never.
    """

    def __init__(
        self,
        program: str | Path,
        n: int = 2,
        args: Sequence[object] = (),
        deadline: float = 540,
        env: Mapping[str, str] | None = None,
        per_worker_env: Sequence[Mapping[str, str]] | None = None,
        *,
        on_line: OnLine | None = None,
        grace: float | None = None,
    ) -> None:
        self.lines: list[list[str]] = [[] for _ in range(n)]
        self._streams: list[dict[str, list[str]]] = [
            {"stdout": [], "stderr": []} for _ in self.lines
        ]
        self._on_line = on_line
        self._deadline = deadline
        self._directory = tempfile.TemporaryDirectory(prefix="gradcomp-test-")
        home = Path(self._directory.name)
        if isinstance(program, str):
            source, program = program, home / "program.py"
            program.write_text(textwrap.dedent(source))
        self._reports = [home / f"worker{index}" for index in range(n)]
        worker_variables = per_worker_env or [{}] * n
        self._job = LocalJob(
            [*PYTHON, str(program), *map(str, args)],
            n,
            env={
                **os.environ,
                **ONE_THREAD,
                **_LONG_CYCLES,
                **_SOON,
                "PYTHONPATH": python_path(),
                **(env or {}),
            },
            worker_env=[
                {"RESULT_PATH": str(report), "PRELOADED": server(index % _SERVERS), **extra}
                for index, (report, extra) in enumerate(
                    zip(self._reports, worker_variables, strict=True)
                )
            ],
            on_line=self._note_line,
            grace=grace,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def kill(self, index: int, signum: int = signal.SIGKILL) -> None:
        """Sends a signal to a worker and all it has started."""
        self._job.send(index, signum)

    def wait_for_line(self, index: int, text: str, timeout: float = 60) -> str:
        """Waits until the worker prints a line with `text` in it (or has already) and returns it.

        Raises:
            AssertionError: If the worker ends without it, or the time is over.
        """
        what = f"worker {index} to print {text!r}"
        for _ in self._steps(timeout, what):
            for line in self.lines[index]:
                if text in line:
                    return line
            if any(end.index == index for end in self._job.ends):
                break
        raise AssertionError(f"waited in vain for {what}\n{self.output()}")

    def wait(self, deadline: float | None = None) -> list[WorkerResult]:
        """Waits until all workers have ended, `deadline` seconds at most.

        Raises:
            AssertionError: If they have not; they are killed then.
        """
        for _ in self._steps(deadline, "the workers to end"):
            pass
        self._job.run()  # All workers have ended: reads the rest of their pipes.
        return [self._result(index) for index in range(len(self.lines))]

    def check(self) -> None:
        """Fails, with the output of all workers, if one has failed."""
        failed = [end for end in self._job.ends if end.returncode != 0]
        if failed:
            summary = "\n".join(self._job.result().summary())
            raise AssertionError(f"{summary}\n{self.output()}")

    def output(self) -> str:
        """The last lines of every worker, for messages."""
        parts = []
        for index, lines in enumerate(self.lines):
            parts += [f"--- worker {index}, last lines:", *lines[-_TAIL_LINES:]]
        return "\n".join(parts)

    def close(self) -> None:
        """Kills what still runs and removes the temporary files."""
        self._job.close()
        self._directory.cleanup()

    def _steps(self, timeout: float | None, what: str) -> Iterator[None]:
        """Keeps the job going until all workers have ended; fails when the time is over."""
        limit = self._deadline
        if timeout is not None:
            limit = min(limit, self._job.seconds + timeout)
        running = True
        while running:
            running = self._job.step()
            yield
            if running and self._job.seconds > limit:
                self._job.close()
                raise AssertionError(
                    f"waited {limit:.0f} s after the start for {what}; killed all\n{self.output()}"
                )

    def _note_line(self, index: int, stream: str, line: str) -> None:
        self.lines[index].append(line)
        self._streams[index][stream].append(line)
        if self._on_line is not None:
            self._on_line(index, line)

    def _result(self, index: int) -> WorkerResult:
        end = next(end for end in self._job.ends if end.index == index)
        stdout, stderr = ("\n".join(self._streams[index][name]) for name in ("stdout", "stderr"))
        reported = _read_report(self._reports[index])
        return WorkerResult(index, end.returncode, stdout, stderr, end.seconds, reported)


def start_servers() -> None:
    """Starts all servers, for this process and for those that it starts."""
    for step in range(_SERVERS):
        server(step)


@functools.cache
def server(number: int) -> str:
    """Returns the `PRELOADED` of `PYTHON`; starts the server once, which ends with this process."""
    variable = f"PRELOADED_BY_{number}"
    if variable not in os.environ:
        os.environ[variable] = _start_server(number)
    return os.environ[variable]


def _start_server(number: int) -> str:
    name = f"{os.getpid()}-{number}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(preloaded.address(name))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, preloaded.__file__, "serve", str(listener.fileno())],
            env={**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    _SERVING.append(process)
    return name


_SERVING: list[subprocess.Popen] = []  # whose inputs stay open as long as they are here


def python_path() -> str:
    """Lets the workers import the tested tf_gradcomp from any folder."""
    paths = [str(Path(tf_gradcomp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))


def _read_report(path: Path) -> Any:
    as_json, as_arrays = path.with_suffix(".json"), path.with_suffix(".npz")
    if as_json.exists():
        return json.loads(as_json.read_text())
    if as_arrays.exists():
        import numpy as np

        with np.load(as_arrays) as arrays:
            return dict(arrays)
    return _NOTHING
