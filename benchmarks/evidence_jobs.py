"""Runs trainings and timings in processes of their own, several at once."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, TypeAlias

import records
import simulated
import tensorflow as tf
from encoding import Encoding
from simulated import Training

import tf_gradcomp as gc

Run: TypeAlias = Training | Encoding

EPOCH = 22  # steps in which each of the digits is seen once
EVALUATIONS = 4  # of tasks that take longer to evaluate
_HERE = Path(__file__).resolve().parent
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SECONDS = {  # of a row's gradient, and of a learner's part of a step, on one core
    "digits": (0.00015, 0.006),
    "mnist": (0.0008, 0.01),
    "shakespeare": (0.0015, 0.026),
    "shakespeare-2layers": (0.003, 0.06),
}
_ENCODING_SECONDS = 0.5  # for each learner
_START_SECONDS = 4.0


def expected_seconds(run: Run) -> float:
    """Returns about how long a run takes on one core."""
    if isinstance(run, Encoding):
        return _START_SECONDS + _ENCODING_SECONDS * run.learners
    of_row, of_learner = _SECONDS[run.task]
    return _START_SECONDS + run.steps * (run.rows * of_row + run.learners * of_learner)


def steps_between_evaluations(run: Training) -> int:
    """Returns the number of steps between two points of a run's curve."""
    return EPOCH if run.task == "digits" else -(-run.steps // EVALUATIONS)


def measure(run: Run) -> dict[str, Any]:
    """Does a run; returns its record."""
    if isinstance(run, Encoding):
        measured = run.measure()
    else:
        measured = simulated.train(run, steps_between_evaluations(run))
    versions = {
        "tf_gradcomp": gc.__version__,
        "tensorflow": tf.__version__,
        "keras": simulated.keras.__version__,
        "python": platform.python_version(),
        "kernels": gc.ops.library_info().simd,
    }
    spent = {"processor_seconds": time.process_time()}
    return records.rounded({**dataclasses.asdict(run), **measured, **spent, "versions": versions})


def record_of(folder: Path, run: Run) -> Path:
    """Returns the file of a run's record."""
    return folder / f"{run.name}.json"


@dataclasses.dataclass
class _Running:
    run: Run
    process: Any
    started: float


class Pool:
    """Does runs in processes that are forked from one in which TensorFlow is loaded.

    Args:
        folder: Where each run leaves its record, and what it printed.
        jobs: How many runs at once.
        threads: Of each.
        tell: Called with the expected seconds of all that is done, again and again.
    """

    def __init__(
        self, folder: Path, jobs: int, threads: int, tell: Callable[[float], None]
    ) -> None:
        self._folder, self._jobs, self._threads, self._tell = folder, jobs, threads, tell
        self._done = self._spent = 0.0  # expected and measured seconds of runs that have ended

    def run_all(self, runs: Sequence[Run], seconds: float | None) -> Iterator[tuple[Run, bool]]:
        """Yields each run when it has ended, and whether it left its record.

        Args:
            runs: In their order, except that towards the end those come first that end in time.
            seconds: After so many, those that have not ended are stopped. None: never.
        """
        context = _preloaded(self._threads)
        stop = time.monotonic() + seconds if seconds else None
        waiting, running = list(runs), dict[int, _Running]()
        try:
            while (waiting or running) and not (stop and time.monotonic() > stop):
                while waiting and len(running) < self._jobs:
                    run = waiting.pop(self._next(waiting, stop))
                    process = context.Process(
                        target=_work, args=(run, self._folder, self._threads), name=run.name
                    )
                    process.start()
                    running[process.sentinel] = _Running(run, process, time.monotonic())
                for ready in connection.wait(list(running), timeout=1):
                    ended = running.pop(ready)
                    ended.process.join()
                    self._done += expected_seconds(ended.run)
                    self._spent += time.monotonic() - ended.started
                    yield ended.run, ended.process.exitcode == 0
                self._tell(self._done + sum(map(_progress, running.values())))
        finally:
            for one in running.values():
                one.process.kill()
                one.process.join()

    def _next(self, waiting: Sequence[Run], stop: float | None) -> int:
        """Returns the place of the first run that can end in time, or else of the shortest one."""
        pace = self._spent / self._done if self._done else 1.0
        left = stop - time.monotonic() if stop else math.inf
        needed = [pace * expected_seconds(run) for run in waiting]
        in_time = (place for place, seconds in enumerate(needed) if seconds < left)
        return next(in_time, needed.index(min(needed)))


def _progress(one: _Running) -> float:
    return min(time.monotonic() - one.started, expected_seconds(one.run))


def _preloaded(threads: int) -> Any:
    """Starts the process that runs are forked from, and returns how to start them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["evidence_jobs"])
    kept = dict(os.environ)
    os.environ.update(dict.fromkeys(_VARIABLES, str(threads)))  # read where NumPy is loaded
    path = os.environ.get("PYTHONPATH")  # where modules are looked for
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_HERE), *([path] if path else [])])
    forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(kept)
    return context


def _work(run: Run, folder: Path, threads: int) -> None:
    """Does one run in this process."""
    log = os.open(folder / f"{run.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    record = measure(run)
    file = record_of(folder, run)
    part = file.with_name(f"{file.name}.part")
    records.write(record, part)
    part.rename(file)
    (folder / f"{run.name}.log").unlink()
