"""Trainings by the example programs in worker processes, and the figures in their records."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from links import Network
from placed import cores, placed_job
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import tf_gradcomp as gc
from tf_gradcomp.launch import JobResult

_ROOT = Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "results"  # which git ignores
_PROGRAMS = Path(__file__).with_name("programs")
LAST_EPOCHS = 5
TABLE_ENTRY_BYTES = 8  # bytes of a payload for each tensor, without the codes
SCALE_BYTES = 4  # bytes that the paper counts for each tensor
_ARGUMENTS = "arguments"  # the key of a record with the program's arguments


@dataclasses.dataclass(frozen=True)
class Task:
    """A training task, and how to read its quality from the history.

    Attributes:
        name: Name of the task and of its files.
        program: The program in `programs`.
        metric: The name of the held-out metric in the history.
        label: Printed name of the metric.
        digits: Number of decimals to print.
        scale: Factor from the metric's unit to the printed unit.
        last: Number of last epochs over which the metric is averaged.
        rises: Whether a higher metric is better.
        batch_size: Batch size of all workers together.
        optimizers: Optimizers that the program takes; a single optimizer is not passed.
        arguments: More arguments of the program.
    """

    name: str
    program: str
    metric: str
    label: str
    digits: int
    scale: float
    last: int
    rises: bool
    batch_size: int
    optimizers: Sequence[str] = ("adam", "sgd")
    arguments: Sequence[str] = ()


DIGITS = Task(
    "digits", "digits_cnn.py", "val_accuracy", "accuracy, %", 2, 100.0, LAST_EPOCHS, True, 64
)
_BITS = ("val_bits_per_character", "bits per character", 3, 1.0, 1, False, 32)
TEXT = Task("text", "char_lstm.py", *_BITS)
TRANSFORMER = Task("transformer", "transformer_lm.py", *_BITS, optimizers=("adamw",))
LARGE_TRANSFORMER = Task(
    "large-transformer",
    "transformer_lm.py",
    *_BITS,
    optimizers=("adamw", "muon"),
    arguments=("--size", "large"),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A training: its settings, and the program's record.

    With `local_steps`, workers exchange once in this number of steps.
    """

    task: Task
    workers: int
    optimizer: str
    compressor: str
    seed: int
    record: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    local_steps: int = 0

    @property
    def name(self) -> str:
        """The name of the run and of its file."""
        parts = [self.task.name, f"{self.workers}workers", self.optimizer, self.compressor]
        parts += [f"{self.local_steps}local"] if self.local_steps else []
        return "-".join([*parts, f"seed{self.seed}"])

    @property
    def method(self) -> str:
        """The compressor and the number of local steps, for tables."""
        if not self.local_steps:
            return self.compressor
        return f"{self.compressor}, {self.local_steps} local steps"

    @property
    def files_without_exchange(self) -> list[str]:
        """The file with the measurements of `Bench.without_exchange`, for each process."""
        return [f"{self.name}-alone{i}.json" for i in range(min(self.workers, cores()))]

    @property
    def file_by_horovod(self) -> str:
        """The file with the measurements of `Bench.by_horovod`."""
        return f"{self.name}-horovod.json"

    @property
    def chosen(self) -> str:
        """The compressor of the training: the requested compressor, or the choice of `auto`."""
        choice = self.record.get("compressor") if self.compressor.startswith("auto") else None
        return choice or self.compressor

    @property
    def curve(self) -> np.ndarray:
        """The held-out metric after each epoch."""
        return self.task.scale * np.array(self.record["history"][self.task.metric])

    @property
    def quality(self) -> float:
        """The held-out metric at the end, as the task reads it."""
        return float(self.curve[-self.task.last :].mean())

    @property
    def steps(self) -> np.ndarray:
        """Steps done at the end of each epoch."""
        return self.record["steps_per_epoch"] * np.arange(1, len(self.curve) + 1)

    @property
    def dense_ring_bytes(self) -> float:
        """Bytes that each worker sends per step in a dense ring all-reduce."""
        return 2 * (self.workers - 1) / self.workers * 4 * self.record["weights"]

    @property
    def sent_bytes(self) -> np.ndarray:
        """Bytes that a worker has sent at the end of each epoch."""
        bytes_per_step = self.record["history"].get("sent_bytes")
        if bytes_per_step is None:
            return self.dense_ring_bytes * self.steps
        return np.cumsum(bytes_per_step) * self.record["steps_per_epoch"]

    @property
    def seconds(self) -> np.ndarray:
        """The end of each epoch, counting only the steps of training."""
        seconds_per_step = np.array(self.record["history"]["seconds_per_step"])
        return np.cumsum(seconds_per_step) * self.record["steps_per_epoch"]

    @property
    def seconds_per_step(self) -> float:
        """Seconds of a step in the second half of the epochs."""
        seconds_by_epoch = self.record["history"]["seconds_per_step"]
        return float(np.mean(seconds_by_epoch[len(seconds_by_epoch) // 2 :]))

    @property
    def payload_ratio(self) -> float:
        """Over the whole run; 1 if dense."""
        traffic = self.record["traffic"]
        return traffic["dense_bytes"] / traffic["payload_bytes"] if traffic else 1.0

    @property
    def wire_ratio(self) -> float:
        """Over the whole run; 1 if dense."""
        traffic = self.record["traffic"]
        if not traffic:
            return 1.0
        return self.dense_ring_bytes * traffic["exchanges"] / traffic["sent_bytes"]

    def paper_ratio(self, kind: str | None = None) -> float:
        """The ratio as AdaComp's paper counts it, of all layers or of one kind."""
        return paper_ratio(self.record["traffic"], kind)


def paper_ratio(traffic: dict[str, Any] | None, kind: str | None = None) -> float:
    """Returns the ratio as AdaComp's paper counts it, of all layers or of one kind."""
    if not traffic:
        return 1.0
    elements = count = 0
    for path, variable in traffic["variables"].items():
        if kind in (None, variable["kind"]):
            elements += variable["elements"] * traffic["exchanges"]
            overhead = (TABLE_ENTRY_BYTES - SCALE_BYTES) * traffic["exchanges"]
            count += traffic["tensor_bytes"][path] - overhead
    return 4 * elements / count if count else 1.0


def checked_compressors(
    _context: click.Context, _option: click.Parameter, names: str | Sequence[str]
) -> str | Sequence[str]:
    """Refuses unknown names before training begins; a callback for `click.option`."""
    for name in [names] if isinstance(names, str) else names:
        try:
            gc.compressors.get(name)
        except (ValueError, TypeError) as error:
            raise click.BadParameter(str(error)) from error
    return names


def horovod_installed() -> bool:
    """Returns whether Horovod is installed for TensorFlow."""
    return importlib.util.find_spec("horovod") is not None


class Bench:
    """Runs trainings one after another and keeps their records in a folder."""

    def __init__(
        self,
        folder: Path,
        reuse: bool,
        network: Network | None = None,
        threads: int | None = None,
    ) -> None:
        self._folder = folder
        self._reuse = reuse
        self._network = network
        self._threads = threads
        self.console = Console()

    def run_all(self, runs: Sequence[Run], args: Sequence[str], epochs: int) -> list[Run]:
        """Runs all trainings, and returns them with their records."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self.console) as progress:
            bar_task = progress.add_task("all runs, epochs", total=epochs * len(runs))
            finished = []
            for run in runs:
                progress.update(bar_task, description=run.name)
                finished.append(self._run(run, args, lambda: progress.advance(bar_task)))
                progress.update(bar_task, completed=epochs * len(finished))
                done = finished[-1]
                progress.console.print(
                    f"{run.name}: {run.task.label} {done.quality:.{run.task.digits}f}, "
                    f"payload ratio {done.payload_ratio:.0f}"
                )
        return finished

    def without_exchange(self, run: Run, args: Sequence[str]) -> float:
        """Returns the seconds of a step of `run` without a network.

        A process for each worker trains alone on its share of the batch, all at the same time. The
        slowest process counts, in the second half of its epochs. If there are more workers than
        cores, only as many processes train as there are cores, and the step time is multiplied by
        the number of workers per core. Processes that do not wait for each other start, validate
        and end at different times, so more processes would get more than their share of a core.
        """
        files = [self._folder / file for file in run.files_without_exchange]
        if not self._reusable(files, args):
            share = str(run.task.batch_size // run.workers)
            command = [*_command(run), "--batch-size", share, *args, "--history"]
            with contextlib.ExitStack() as stack:
                jobs = [
                    stack.enter_context(
                        placed_job([*command, str(file)], Network(1), self._threads, _ignore)
                    )
                    for file in files
                ]
                while sum(job.step() for job in jobs):
                    pass
                for job in jobs:
                    _check(f"{run.name}, a worker alone,", job.result())
            for file in files:
                _note_arguments(file, args)
        records = [json.loads(file.read_text()) for file in files]
        slowest = max(
            dataclasses.replace(run, record=record).seconds_per_step for record in records
        )
        return slowest * run.workers / len(files)

    def by_horovod(self, run: Run, args: Sequence[str]) -> float:
        """Returns the seconds of a step of `run`, dense and by Horovod, in this network."""
        file = self._folder / run.file_by_horovod
        if not self._reusable([file], args):
            network = self._network or Network(run.workers)
            program = [sys.executable, str(Path(__file__).with_name("horovod_dense.py"))]
            program += [run.task.name, "--optimizer", run.optimizer, "--seed", str(run.seed)]
            command = [*program, "--interface", network.interface, *args, "--history", str(file)]
            with placed_job(command, network, self._threads, _ignore) as job:
                _check(f"{run.name}, by Horovod,", job.run())
            _note_arguments(file, args)
        return dataclasses.replace(run, record=json.loads(file.read_text())).seconds_per_step

    def _run(self, run: Run, args: Sequence[str], on_epoch: Callable[[], None]) -> Run:
        file = self._folder / f"{run.name}.json"
        if not self._reusable([file], args):
            file.unlink(missing_ok=True)
            self._train(run, [*args, "--history", str(file)], on_epoch)
            _note_arguments(file, args)
        return dataclasses.replace(run, record=json.loads(file.read_text()))

    def _reusable(self, files: Sequence[Path], args: Sequence[str]) -> bool:
        """Returns whether all records exist and may be reused.

        Raises:
            click.UsageError: If a record is of a run with other arguments.
        """
        if not (self._reuse and all(file.exists() for file in files)):
            return False
        for file in files:
            used = json.loads(file.read_text()).get(_ARGUMENTS)
            if used != [*args]:
                raise click.UsageError(
                    f"'{file}' cannot be reused: it belongs to a run with "
                    f"{shlex.join(used or ['unknown arguments'])}, not with {shlex.join(args)}; "
                    "leave --reuse out, or give another folder by --results."
                )
        return True

    def _train(self, run: Run, args: Sequence[str], on_epoch: Callable[[], None]) -> None:
        def on_line(worker: int, _stream: str, line: str) -> None:
            if worker == 0 and line.startswith("Epoch "):
                on_epoch()

        command = [*_command(run), *args]
        network = self._network or Network(run.workers)
        with placed_job(command, network, self._threads, on_line) as job:
            _check(run.name, job.run())


def _note_arguments(file: Path, args: Sequence[str]) -> None:
    """Adds the program's arguments to a record."""
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, _ARGUMENTS: [*args]}))


def _ignore(_worker: int, _stream: str, _line: str) -> None:
    """Discards a job's output."""


def _check(what: str, result: JobResult) -> None:
    if result.exit_code:
        raise click.ClickException("\n".join([f"{what} failed.", *result.summary()]))


def _command(run: Run) -> list[str]:
    """Returns the command of the program, with the run's arguments."""
    settings = [*run.task.arguments, "--compressor", run.compressor, "--seed", str(run.seed)]
    if len(run.task.optimizers) > 1:
        settings += ["--optimizer", run.optimizer]
    if run.local_steps:
        settings += ["--local-steps", str(run.local_steps)]
    return [sys.executable, str(_PROGRAMS / run.task.program), *settings]
