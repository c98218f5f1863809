"""Runs trainings and timings in separate processes, several at once."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, Protocol

import click
import keras
import records
import tensorflow as tf
from records import Record
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import tf_gradcomp as gc

_HERE = Path(__file__).resolve().parent
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Run(Protocol):
    """A training or a timing."""

    @property
    def name(self) -> str:
        """The name of the run, and of its record."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The way in which runs are done.

    Attributes:
        measure: Does a run, and returns its record: a function of a module, not of the program.
        seconds: Returns about how long a run takes on one core.
        summary: Returns the text to print for a record.
    """

    measure: Callable[[Any], Record]
    seconds: Callable[[Any], float]
    summary: Callable[[Record], str]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The part of the machine that runs may use: the options of `pool_options`.

    Attributes:
        jobs: The number of runs at once.
        threads: The number of threads of each run; None shares out the cores.
        minutes: The minutes after which unfinished runs are stopped; None: never.
    """

    jobs: int = 1
    threads: int | None = None
    minutes: float | None = None


def pool_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--jobs`, `--threads` and `--minutes` to a command: the arguments of `Limits`."""
    options = (
        click.option(
            "--jobs", default=1, type=click.IntRange(min=1), help="How many runs at once."
        ),
        click.option(
            "--threads",
            type=click.IntRange(min=1),
            show_default="the cores, shared out among the jobs",
            help="Threads of each run.",
        ),
        click.option("--minutes", type=float, help="Stop then; unfinished runs leave no record."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def missing_runs(
    runs: Sequence[Any], file: Path, overwrite: bool, reuse: bool, option: str
) -> list[Any]:
    """Returns the runs that are to be done.

    Args:
        runs: Dataclasses, whose fields are in their records.
        file: The file of records.
        overwrite: Whether earlier records of these runs are removed.
        reuse: Whether runs with a record are left out.
        option: The option that reuses records.

    Raises:
        click.UsageError: If there are records of these runs that may be neither removed nor reused,
            or if a record is of another run, which an earlier version has left under the same name.
    """
    recorded = records.by_name(file)
    found = [run for run in runs if run.name in recorded]
    if found and not (overwrite or reuse):
        raise click.UsageError(
            f"'{file}' holds the results of an earlier run ({found[0].name}, ...): give another "
            f"folder by --results, {option} or --overwrite."
        )
    if overwrite and not reuse:
        names = {run.name for run in found}
        rest = {name: record for name, record in recorded.items() if name not in names}
        records.write_by_name(file, rest)
        return list(runs)
    for run in found:
        record, wanted = recorded[run.name], dataclasses.asdict(run)
        if {key: record.get(key) for key in wanted} != wanted:
            raise click.UsageError(
                f"{run.name} in '{file}' cannot be taken by {option}: it is of another run than "
                f"{wanted}; delete it, or give another folder by --results."
            )
    return [run for run in runs if run.name not in recorded]


def do_all(runs: Sequence[Run], file: Path, work: Work, limits: Limits, resume_option: str) -> int:
    """Does all runs, adds their records to a file, and shows how far they are.

    Args:
        runs: In their order.
        file: The file of records; its folder gets the output of runs that fail.
        work: How to do them.
        limits: The resources that they may use.
        resume_option: The option that does runs that have not ended.

    Returns:
        How many failed.
    """
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left:"), TimeRemainingColumn(), console=console) as bar:
        bar_task = bar.add_task("runs", total=sum(map(work.seconds, runs)))
        pool = Pool(file.parent, work, limits, lambda done: bar.update(bar_task, completed=done))
        ended = failed = 0
        for run, record in pool.run_all(runs):
            ended += 1
            if record is None:
                failed += 1
                summary = f"failed, see {file.parent / run.name}.log"
            else:
                records.append(file, run.name, record)
                summary = work.summary(record)
            bar.update(bar_task, description=f"{ended} of {len(runs)} runs")
            console.print(f"{ended} of {len(runs)}: {run.name}: {summary}")
    records.write_by_name(file, records.by_name(file))
    if ended < len(runs):
        console.print(f"{len(runs) - ended} runs have not ended; {resume_option} does them.")
    return failed


@dataclasses.dataclass
class _Running:
    run: Run
    process: Any
    started: float


class Pool:
    """Does runs in processes that are forked from one in which TensorFlow is loaded.

    Args:
        folder: The folder for the output of runs that fail.
        work: How to do them.
        limits: The resources that they may use.
        report: Called repeatedly with the expected seconds of all finished runs.
    """

    def __init__(
        self, folder: Path, work: Work, limits: Limits, report: Callable[[float], None]
    ) -> None:
        self._folder, self._work, self._limits, self._report = folder, work, limits, report
        self._threads = limits.threads or max(1, (os.cpu_count() or 1) // limits.jobs)
        self._done = self._spent = 0.0  # expected and measured seconds of runs that have ended

    def run_all(self, runs: Sequence[Run]) -> Iterator[tuple[Run, Record | None]]:
        """Yields each run when it has ended, and its record; None if it failed.

        Args:
            runs: In their order; towards the end, runs that can end in time come first.
        """
        measure, minutes = self._work.measure, self._limits.minutes
        context = _preloaded(measure.__module__, self._threads)
        stop = time.monotonic() + 60 * minutes if minutes else None
        waiting, running = list(runs), dict[Any, _Running]()  # by the end of a pipe
        try:
            while (waiting or running) and not (stop and time.monotonic() > stop):
                while waiting and len(running) < self._limits.jobs:
                    run = waiting.pop(self._next(waiting, stop))
                    receiver, sender = context.Pipe(duplex=False)
                    args = (run, measure, self._folder, self._threads, sender)
                    process = context.Process(target=_work, args=args, name=run.name)
                    process.start()
                    sender.close()
                    running[receiver] = _Running(run, process, time.monotonic())
                for ready in connection.wait(list(running), timeout=1):
                    ended, record = running.pop(ready), None
                    with contextlib.suppress(EOFError):  # the process has failed
                        record = ready.recv()
                    ended.process.join()
                    self._done += self._work.seconds(ended.run)
                    self._spent += time.monotonic() - ended.started
                    yield ended.run, record
                self._report(self._done + sum(map(self._progress, running.values())))
        finally:
            for entry in running.values():
                entry.process.kill()
                entry.process.join()

    def _next(self, waiting: Sequence[Run], stop: float | None) -> int:
        """Returns the place of the first run that can end in time, or else of the shortest one."""
        pace = self._spent / self._done if self._done else 1.0
        seconds_left = stop - time.monotonic() if stop else math.inf
        needed = [pace * self._work.seconds(run) for run in waiting]
        in_time = (index for index, seconds in enumerate(needed) if seconds < seconds_left)
        return next(in_time, needed.index(min(needed)))

    def _progress(self, entry: _Running) -> float:
        return min(time.monotonic() - entry.started, self._work.seconds(entry.run))


def _preloaded(module: str, threads: int) -> Any:
    """Starts the process that runs are forked from, and returns how to start them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    environment = dict(os.environ)
    os.environ.update(dict.fromkeys(_VARIABLES, str(threads)))  # read where NumPy is loaded
    path = os.environ.get("PYTHONPATH")  # where modules are looked for
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_HERE), *([path] if path else [])])
    forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(environment)
    return context


def _work(
    run: Run,
    measure: Callable[[Any], Record],
    folder: Path,
    threads: int,
    sender: connection.Connection,
) -> None:
    """Does one run in this process, and sends its record."""
    log = folder / f"{run.name}.log"
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    versions = {
        "tf_gradcomp": gc.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
        "kernels": gc.ops.library_info().simd,
    }
    measured = measure(run)
    spent = {"processor_seconds": round(time.process_time(), 1)}
    sender.send({**measured, **spent, "versions": versions})
    log.unlink()
