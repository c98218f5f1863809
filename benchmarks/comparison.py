"""Comparisons of the time to an accuracy: their settings, runs, and times of steps."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import click
import links
import records
from placed import shared_out_threads
from time_to_accuracy_report import DENSE, FREE, HOROVOD
from trainings import (
    DIGITS,
    LARGE_TRANSFORMER,
    TEXT,
    TRANSFORMER,
    Bench,
    Run,
    Task,
    horovod_installed,
)

CURVES = "curves"  # folder of whole runs


@dataclasses.dataclass(frozen=True)
class Setting:
    """Training settings of a task.

    Attributes:
        task: The task.
        epochs: Number of epochs of the dense run.
        timed: Number of epochs after which steps are timed, because AdaComp sends more in the first
            epochs.
        steps: Number of steps in an epoch.
        decays: Whether the learning rate falls to zero, so that all runs have equally many epochs.
        within: Largest distance from the dense run's figure that counts as equally good, in the
            task's unit.
    """

    task: Task
    epochs: int
    timed: int
    steps: int
    decays: bool = False
    within: float = 0.0

    def args(self, epochs: int, round_steps: int) -> list[str]:
        """Returns the program's arguments for epochs of whole rounds: see `in_rounds`."""
        count, steps = self.in_rounds(epochs, round_steps)
        return ["--epochs", str(count), "--steps-per-epoch", str(steps)]

    def in_rounds(self, epochs: int, round_steps: int) -> tuple[int, int]:
        """Returns the number of longer epochs in place of `epochs`, and the steps in each.

        Args:
            epochs: Number of epochs of `steps` steps.
            round_steps: The new number of steps is a multiple of it; 0 keeps `steps`.
        """
        if not round_steps:
            return epochs, self.steps
        steps = round_steps * math.ceil(self.steps / round_steps)
        return max(2, round(epochs * self.steps / steps)), steps


SETTINGS = {
    setting.task.name: setting
    for setting in (
        Setting(DIGITS, 30, 10, 22),
        Setting(TEXT, 20, 2, 200),
        Setting(TRANSFORMER, 10, 2, 200, decays=True, within=math.log2(1.01)),
        Setting(LARGE_TRANSFORMER, 10, 2, 16, decays=True, within=math.log2(1.01)),
    )
}


@dataclasses.dataclass(frozen=True)
class Pace:
    """Speed at which a method trains on a link.

    Attributes:
        compressor: The requested compressor.
        chosen: The compressor that was used; for `auto`, its choice.
        seconds: Seconds per step.
        local_steps: Number of steps in a round; 0 for synchronous training.
    """

    compressor: str
    chosen: str
    seconds: float
    local_steps: int = 0


@dataclasses.dataclass(frozen=True)
class Timed:
    """The times of steps on some links.

    Attributes:
        paces: The speed of each method, by link.
        speeds: The measurements of the links that were measured.
        about: Facts on the machine.
    """

    paces: Mapping[str, Sequence[Pace]]
    speeds: Mapping[str, Mapping[str, Any]]
    about: Mapping[str, Any]


class RecordedPaces(NamedTuple):
    """The times of steps in one setup.

    Attributes:
        machine: The machine on which they were measured.
        rows: A row for each method, by its printed name.
        measured: The speed of the link, where it was recorded.
    """

    machine: str
    rows: Mapping[str, Mapping[str, Any]]
    measured: Mapping[str, Any] | None

    def check(self, methods: Iterable[str]) -> None:
        """Checks that a time is recorded for each method.

        Raises:
            click.UsageError: If a time is missing.
        """
        missing = [name for name in methods if name not in self.rows]
        if missing:
            raise click.UsageError(
                f"--paces: no time of a step is recorded for {', '.join(missing)}; expected some "
                f"of {', '.join(self.rows)}. Choose the methods by -c, or measure without --paces."
            )

    def seconds(self, method: str) -> float:
        """Returns the seconds of a step."""
        return self.rows[method]["seconds of a step"]

    def chosen(self, method: str) -> str:
        """Returns the compressor that was used; for `auto`, its choice."""
        return self.rows[method]["chosen"]


def read_paces(file: Path, **setup: Any) -> RecordedPaces:
    """Reads the times of a setup.

    Args:
        file: A result of time_to_accuracy.py, or `records/network.jsonl`.
        **setup: The task, optimizer, workers, delay and link.

    Raises:
        click.UsageError: If the file has no times of that setup.
    """
    if file.suffix == ".jsonl":
        recorded = records.read_network(file)["setups"]
    else:
        recorded = records.merge_times([json.loads(file.read_text())])
    wanted = tuple(setup[key] for key in records.SETUP)
    for one in recorded:
        if tuple(one[key] for key in records.SETUP) == wanted:
            timed = {
                row["method"]: row for row in one["rows"] if row["seconds of a step"] is not None
            }
            about = one["about"]
            machine = about.get(records.PACES, about)["machine"]
            return RecordedPaces(machine, timed, one.get("measured"))
    raise click.UsageError(f"--paces: {file} has no times of {setup}.")


def at_pace(curve: Run, pace: Pace) -> Run:
    """Returns the run as if each of its steps had taken `pace.seconds`."""
    history = {**curve.record["history"], "seconds_per_step": [pace.seconds] * len(curve.curve)}
    record = {**curve.record, "history": history, "compressor": pace.chosen}
    return dataclasses.replace(curve, compressor=pace.compressor, record=record)


Method: TypeAlias = tuple[str, int]
"""A compressor, and the number of local steps; 0 for synchronous training."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison of methods with dense training on one task.

    Attributes:
        setting: The training settings of the task.
        workers: Number of workers, each with an equal share of the batch.
        optimizer: Name of the optimizer, as the program takes it.
        methods: The methods to compare with dense training.
        delay: The delay of packets in milliseconds.
        rate: The learning rate of whole runs; None is the program's own.
        local_rate: The learning rate of whole runs with local steps; None is `rate`.
        reuse: Whether to reuse existing records.
    """

    setting: Setting
    workers: int
    optimizer: str
    methods: Sequence[Method]
    delay: float
    rate: float | None
    local_rate: float | None
    reuse: bool

    @property
    def name(self) -> str:
        """Prefix of the names of the comparison's files."""
        name = f"time-to-accuracy-{self.setting.task.name}-{self.optimizer}-{self.workers}workers"
        return name + self._delayed

    @property
    def _delayed(self) -> str:
        return f"-{self.delay:g}ms" if self.delay else ""

    def speed(self, link: str) -> str:
        """Returns a link's part of file names."""
        return links.SPEEDS.get(link, link) + self._delayed

    def runs(self, methods: Iterable[Method], seeds: int = 1) -> list[Run]:
        """Returns the runs of some methods, for a number of seeds."""
        return [
            Run(self.setting.task, self.workers, self.optimizer, name, seed, local_steps=steps)
            for name, steps in methods
            for seed in range(seeds)
        ]

    @property
    def timed(self) -> list[Run]:
        """The runs that are timed on each link, the dense run first."""
        return self.runs(dict.fromkeys([(DENSE, 0), *self.methods]))

    def paces(self, network: links.Network, link: str, folder: Path) -> list[Pace]:
        """Measures the speed of all methods on a link, and of training on a free network."""
        network.shape(link)
        bench = Bench(folder / self.speed(link), self.reuse, network, self._threads)
        count = self.setting.timed
        free = bench.without_exchange(self.timed[0], self._args(count))
        return [
            *(
                Pace(run.compressor, run.chosen, run.seconds_per_step, run.local_steps)
                for run in self._run_all(bench, self.timed, count)
            ),
            *self._horovod(bench),
            Pace(FREE, FREE, free),
        ]

    def _horovod(self, bench: Bench) -> Iterator[Pace]:
        """Yields the speed of dense training by Horovod, if it is installed."""
        if horovod_installed():
            args = self._args(self.setting.timed)
            yield Pace(HOROVOD, DENSE, bench.by_horovod(self.timed[0], args))

    def recorded(self, file: Path, link: str) -> RecordedPaces:
        """Reads the recorded speeds on a link of all methods, and of training on a free network."""
        found = read_paces(
            file,
            task=self.setting.task.name,
            optimizer=self.optimizer,
            workers=self.workers,
            delay=self.delay,
            link=link,
        )
        found.check([*(run.method for run in self.timed), FREE])
        return found

    def as_recorded(self, found: RecordedPaces) -> list[Pace]:
        """Returns the recorded speeds."""
        methods = {run.method: (run.compressor, run.local_steps) for run in self.timed}
        methods |= {name: (name, 0) for name in (HOROVOD, FREE) if name in found.rows}
        return [
            Pace(compressor, found.chosen(name), found.seconds(name), steps)
            for name, (compressor, steps) in methods.items()
        ]

    def curves(self, methods: Iterable[Method], seeds: int, epochs: int, folder: Path) -> list[Run]:
        """Runs these methods completely over the loopback, without timing."""
        bench = Bench(folder / CURVES, self.reuse, threads=self._threads)
        done = []
        for local, group in itertools.groupby(self.runs(methods, seeds), _takes_local_steps):
            rate = (local and self.local_rate) or self.rate
            arguments = ["--learning-rate", f"{rate:g}"] if rate else []
            done += self._run_all(bench, [*group], epochs, arguments)
        return done

    def _run_all(
        self, bench: Bench, runs: Sequence[Run], epochs: int, arguments: Sequence[str] = ()
    ) -> list[Run]:
        count, _ = self.setting.in_rounds(epochs, self._whole)
        return bench.run_all(runs, [*self._args(epochs), *arguments], count)

    def _args(self, epochs: int) -> list[str]:
        return self.setting.args(epochs, self._whole)

    @property
    def _whole(self) -> int:
        """The smallest number of steps that is whole rounds of every length; 0 without rounds."""
        lengths = [steps for _, steps in self.methods if steps]
        return math.lcm(*lengths) if lengths else 0

    @property
    def _threads(self) -> int:
        return shared_out_threads(self.workers)


def _takes_local_steps(run: Run) -> bool:
    return run.local_steps > 0


def placed_on(link: Sequence[Pace], curves: Sequence[Run]) -> list[Run]:
    """Returns the runs of a link: each method's curves, at its pace on the link."""
    by_method = {
        method: [run for run in curves if (run.compressor, run.local_steps) == method]
        for method in methods_of(link)
    }
    return [at_pace(run, pace) for pace in link for run in by_method[_method(pace)]]


def methods_of(paces: Iterable[Pace]) -> list[Method]:
    return list(dict.fromkeys(map(_method, paces)))


def _method(pace: Pace) -> Method:
    """Identifies a run's curve."""
    dense = pace.compressor in (FREE, HOROVOD)
    return (DENSE, 0) if dense else (pace.chosen, pace.local_steps)
