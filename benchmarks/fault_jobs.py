"""The jobs of `faults.py`: what they train, how they are started, and what is seen of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import links
import marked
from soak import GRADCOMP, Log

from tf_gradcomp.launch import LocalJob
from tf_gradcomp.launch.job import PRELOAD_AFTER
from tf_gradcomp.launch.processes import start_process

PROGRAM = Path(marked.__file__)
WORKERS = 2
EPOCH = "epoch"
_POLL = 0.02  # seconds between two looks at the job
_MANY = 10**6  # more restarts and epochs than any job has
_IMPORTING = 20.0  # seconds that imports in advance may take
_TAIL = 20  # lines of a job that has ended

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Task:
    """A training.

    Attributes:
        program: A program of `programs/`.
        arguments: Its arguments.
        epoch: The steps of an epoch.
        often: The steps between two saves, if it does not save after each epoch.
        preload: Whether processes import Keras in advance for a restart.
    """

    program: str
    arguments: tuple[str, ...]
    epoch: int
    often: int
    preload: bool = False

    def command(self, folder: Path, saves: str) -> list[str]:
        """Returns the program and its arguments."""
        steps = ("--epochs", str(_MANY), "--steps-per-epoch", str(self.epoch))
        return [str(PROGRAM), str(folder), saves, self.program, *self.arguments, *steps]

    @property
    def unprepared(self) -> float:
        """The seconds after a start in which nothing may have been imported in advance."""
        return PRELOAD_AFTER + _IMPORTING if self.preload else 0.0

    def interval(self, saves: str) -> int:
        """Returns the number of steps between two saves."""
        return self.epoch if saves == EPOCH else int(saves)


def _in_rounds(task: Task) -> Task:
    return dataclasses.replace(task, arguments=(*task.arguments, "--local-steps", "16"))


def _preloaded(task: Task) -> Task:
    return dataclasses.replace(task, preload=True)


_DIGITS = Task("digits_cnn", (), epoch=200, often=50)
_TRANSFORMER = Task("transformer_lm", ("--size", "large"), epoch=100, often=20)
TASKS = {
    "digits": _DIGITS,
    "digits, rounds": _in_rounds(_DIGITS),
    "digits, preloaded": _preloaded(_DIGITS),
    "transformer": _TRANSFORMER,
    "transformer, rounds": _in_rounds(_TRANSFORMER),
    "transformer, preloaded": _preloaded(_TRANSFORMER),
    "transformer, rounds, preloaded": _preloaded(_in_rounds(_TRANSFORMER)),
}


class JobEndedError(Exception):
    """A job has ended, or takes too long."""


class Job(Protocol):
    """A running job; `said` has the time and the text of each line of its launcher."""

    said: list[tuple[float, str]]

    def step(self) -> bool:
        """Waits for a moment; returns whether the job is running."""

    def close(self) -> None:
        """Ends the job."""


class Restarted:
    """A job of `gradcomp run --max-restarts`, which does not outlive this process.

    Args:
        arguments: The program and its arguments.
        preload: Whether processes import Keras in advance.
    """

    def __init__(self, arguments: Sequence[str], *, preload: bool) -> None:
        self.said: list[tuple[float, str]] = []
        options = ["-n", str(WORKERS), "--max-restarts", str(_MANY), "--json"]  # all to stderr
        options += ["--preload", "keras,tf_gradcomp"] if preload else []
        self._process = start_process([*GRADCOMP, "run", *options, *arguments], os.environ)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said.append((time.monotonic(), line.decode(errors="replace").rstrip()))

    def step(self) -> bool:
        """Waits for a moment; returns whether the job is running."""
        time.sleep(_POLL)
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the job."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._reader.join()


class Linked:
    """A job whose workers are behind links. It is started again each time that it has ended.

    Args:
        arguments: The program and its arguments.
        network: The links.
    """

    def __init__(self, arguments: Sequence[str], network: links.Network) -> None:
        self.said: list[tuple[float, str]] = []
        self._arguments, self._network = arguments, network
        self._job = self._start()

    def _start(self) -> LocalJob:
        return LocalJob(
            [sys.executable, *self._arguments],
            WORKERS,
            env={"TF_CPP_MIN_LOG_LEVEL": "1", **os.environ},
            worker_prefix=self._network.prefixes,
            hosts=self._network.hosts,
            on_line=lambda _index, _stream, line: self.said.append((time.monotonic(), line)),
        )

    def step(self) -> bool:
        """Waits for a moment; returns whether the job is running."""
        if not self._job.step():
            self._job.close()
            self._job = self._start()
        return True

    def close(self) -> None:
        """Ends the job."""
        self._job.close()


class Watch:
    """A running job and its log."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.log = Log(folder)
        self.job = job

    def wait(self, condition: Callable[[], T | None], seconds: float) -> T:
        """Waits until a condition returns something that is true, and returns it.

        Raises:
            JobEndedError: If the job has ended, or the time has passed.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            running = self.job.step()
            self.log.read()
            if value := condition():
                return value
            if not running:
                break
        lines = [line for _, line in self.job.said[-_TAIL:]]
        raise JobEndedError("\n".join(["the job has ended, or takes too long:", *lines]))

    def sleep(self, seconds: float) -> None:
        """Watches the job for some seconds."""
        until = time.monotonic() + seconds
        if seconds > 0:
            self.wait(lambda: time.monotonic() >= until, 2 * seconds)


@contextlib.contextmanager
def running(task: Task, saves: str, network: links.Network | None = None) -> Iterator[Watch]:
    """Runs a job within this context.

    Args:
        task: What it trains.
        saves: `epoch`, or the number of steps between two saves.
        network: The links of the workers; None for `gradcomp run`.
    """
    with tempfile.TemporaryDirectory(prefix="gradcomp-faults-") as name:
        command = task.command(Path(name), saves)
        job: Job
        if network is None:
            job = Restarted(command, preload=task.preload)
        else:
            job = Linked(command, network)
        try:
            yield Watch(job, Path(name))
        finally:
            job.close()
