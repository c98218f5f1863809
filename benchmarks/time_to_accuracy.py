"""Measures how long training takes on a slow link to become as good as a finished dense run.

    python benchmarks/time_to_accuracy.py digits --optimizer sgd
    python benchmarks/time_to_accuracy.py text -c adacomp --link "100 Mbit/s" --link "1 Gbit/s"
    python benchmarks/time_to_accuracy.py transformer --workers 4 --seeds 3
    python benchmarks/time_to_accuracy.py digits --local-steps 16 --local-steps 64 --delay 20

The runs train the programs of `keras_examples/`. The benchmark measures the speed of each link, and
then times the first steps of a run on it. Workers are behind links that `tc` shapes (see
`network.py`; needs root), and that `relay.py` delays with `--delay`. The quality of a run after
each number of steps is measured once, in whole runs over the loopback, because the quality is the
same on every link. The training time is the number of steps times the seconds per step, without
validation and start-up. Only the first part needs an idle machine.

All runs must reach the same figure: the worst final figure of a dense run over the seeds, read as
in convergence.py, or the figure of `--goal`. The Transformer's learning rate falls to zero at the
end of each run. All runs of the Transformer therefore have the same number of epochs, and must come
within 1 % of the dense run's perplexity.

Runs with local steps exchange once in a round of several steps. Epochs are then longer, so that
they are whole rounds, and all runs have proportionally fewer of them. The epochs of all runs are
equally long, because a run that is evaluated more often reaches a figure earlier.
`--local-learning-rate` sets the learning rate of these runs.

The result of a free network is a dense run with steps that exchange nothing. These steps are timed
with one process for each worker. All processes train at the same time, each alone with its share of
the batch. If there are more workers than cores, only as many processes train as there are cores.
The time of a step is then multiplied by the number of workers that share a core.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import click
import links
from machine import processor
from output import show
from placed import measured_links, shared_out_threads
from rich.console import Console
from time_to_accuracy_report import DENSE, FREE, compare, fixed_goal, markdown, means, plot
from trainings import DIGITS, RESULTS, TEXT, TRANSFORMER, Bench, Run, Task, checked_compressors

from tf_gradcomp.cli.options import results_folder, results_options

RECORDS, CURVES = "time-to-accuracy", "curves"  # nested folders of records


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

    def args(self, epochs: int, whole: int) -> list[str]:
        """Returns the program's arguments for epochs of whole rounds: see `in_rounds`."""
        count, steps = self.in_rounds(epochs, whole)
        return ["--epochs", str(count), "--steps-per-epoch", str(steps)]

    def in_rounds(self, epochs: int, whole: int) -> tuple[int, int]:
        """Returns the number of longer epochs in place of `epochs`, and the steps in each.

        Args:
            epochs: Number of epochs of `steps` steps.
            whole: The new number of steps is a multiple of it; 0 keeps `steps`.
        """
        if not whole:
            return epochs, self.steps
        steps = whole * math.ceil(self.steps / whole)
        return max(2, round(epochs * self.steps / steps)), steps


SETTINGS = {
    setting.task.name: setting
    for setting in (
        Setting(DIGITS, 30, 10, 22),
        Setting(TEXT, 20, 2, 200),
        Setting(TRANSFORMER, 10, 2, 200, decays=True, within=math.log2(1.01)),
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
        local_rate: The learning rate of runs with local steps; None is the program's own.
        reuse: Whether to reuse existing records.
    """

    setting: Setting
    workers: int
    optimizer: str
    methods: Sequence[Method]
    delay: float
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

    def paces(self, network: links.Network, link: str, records: Path) -> list[Pace]:
        """Measures the speed of all methods on a link, and of training on a free network."""
        network.shape(link)
        bench = Bench(records / self.speed(link), self.reuse, network, self._threads)
        count = self.setting.timed
        free = bench.without_exchange(self.timed[0], self._args(count, 0))
        return [
            *(
                Pace(run.compressor, run.chosen, run.seconds_per_step, run.local_steps)
                for run in self._run_all(bench, self.timed, count)
            ),
            Pace(FREE, FREE, free),
        ]

    def curves(
        self, methods: Iterable[Method], seeds: int, epochs: int, records: Path
    ) -> list[Run]:
        """Runs these methods completely over the loopback, without timing."""
        bench = Bench(records / CURVES, self.reuse, threads=self._threads)
        return self._run_all(bench, self.runs(methods, seeds), epochs)

    def _run_all(self, bench: Bench, runs: Sequence[Run], epochs: int) -> list[Run]:
        done = []
        count, _ = self.setting.in_rounds(epochs, self._whole)
        for length, some in itertools.groupby(runs, lambda run: run.local_steps):
            done += bench.run_all([*some], self._args(epochs, length), count)
        return done

    def _args(self, epochs: int, local_steps: int) -> list[str]:
        args = self.setting.args(epochs, self._whole)
        if local_steps and self.local_rate:
            args += ["--learning-rate", f"{self.local_rate:g}"]
        return args

    @property
    def _whole(self) -> int:
        """The smallest number of steps that is whole rounds of every length; 0 without rounds."""
        lengths = [steps for _, steps in self.methods if steps]
        return math.lcm(*lengths) if lengths else 0

    @property
    def _threads(self) -> int:
        return shared_out_threads(self.workers)


def placed_on(link: Sequence[Pace], curves: Sequence[Run]) -> list[Run]:
    """Returns the runs of a link: each method's curves, at its pace on the link."""
    by_method = {
        method: [run for run in curves if (run.compressor, run.local_steps) == method]
        for method in _methods(link)
    }
    return [at_pace(run, pace) for pace in link for run in by_method[_method(pace)]]


def _methods(paces: Iterable[Pace]) -> list[Method]:
    return list(dict.fromkeys(map(_method, paces)))


def _method(pace: Pace) -> Method:
    """Identifies a run's curve."""
    return (DENSE, 0) if pace.compressor == FREE else (pace.chosen, pace.local_steps)


_EPOCHS = "Epochs of the dense run. [digits: 30; text: 20 of 200 steps; transformer: 10 of 200]"
_LOCAL_RATE = "The learning rate of runs with --local-steps. [default: that of all runs]"
_LONGER = "Compressed runs have this multiple of the dense run's epochs, except the Transformer's."


@click.command(help=__doc__, context_settings={"show_default": True})
@click.argument("task", type=click.Choice(list(SETTINGS)))
@click.option(
    "-c",
    "--compressor",
    "compressors",
    multiple=True,
    default=["cast", "adacomp", "auto", "power_sgd"],
    callback=checked_compressors,
)
@click.option(
    "--local-steps",
    multiple=True,
    type=click.IntRange(min=2),
    help="Also train with one exchange in this number of steps. Repeat the option to compare.",
)
@click.option(
    "--local-compressor",
    "local_compressors",
    multiple=True,
    default=["no_compression", "top_k(density=0.05, value_bits=2, chunk=128)"],
    callback=checked_compressors,
    help="The compressor of runs with --local-steps.",
)
@click.option("--local-learning-rate", type=float, help=_LOCAL_RATE)
@click.option(
    "--workers",
    default=2,
    type=click.IntRange(min=2),
    help="Each worker has an equal share of the batch.",
)
@click.option("--optimizer", help="adam or sgd; the Transformer has adamw.  [default: the first]")
@click.option(
    "--link",
    "speeds",
    multiple=True,
    default=["100 Mbit/s"],
    type=click.Choice([*links.SPEEDS, links.UNSHAPED]),
)
@click.option(
    "--delay",
    default=0.0,
    type=click.FloatRange(min=0),
    help="The delay of packets on links, in each direction, in milliseconds.",
)
@click.option("--seeds", default=1, help="How many: 0, 1, ...")
@click.option("--epochs", type=int, help=_EPOCHS)
@click.option("--longer", default=2.0, help=_LONGER)
@click.option("--goal", type=float, help="Figure to reach. [default: the dense runs' figure]")
@results_options(str(RESULTS))
@click.option("--reuse", is_flag=True, help="Reuse existing runs.")
def main(
    task: str,
    compressors: Sequence[str],
    local_steps: Sequence[int],
    local_compressors: Sequence[str],
    local_learning_rate: float | None,
    workers: int,
    optimizer: str | None,
    speeds: Sequence[str],
    delay: float,
    seeds: int,
    epochs: int | None,
    longer: float,
    goal: float | None,
    results: Path,
    overwrite: bool,
    reuse: bool,
) -> None:
    setting = SETTINGS[task]
    trained = setting.task
    optimizer = optimizer or trained.optimizers[0]
    if optimizer not in trained.optimizers:
        raise click.UsageError(f"{task} is trained by {' or '.join(trained.optimizers)}.")
    if trained.batch_size % workers:
        raise click.UsageError(f"{workers} workers cannot share {trained.batch_size} rows equally.")
    missing = links.missing(delay / 1000)
    if missing:
        raise click.ClickException(f"{missing} Without, there are no slow links.")
    methods = [(name, 0) for name in compressors]
    methods += itertools.product(local_compressors, local_steps)
    methods.sort(key=lambda method: method[1])
    compared = Comparison(setting, workers, optimizer, methods, delay, local_learning_rate, reuse)
    tables = [f"{compared.name}.json", f"{compared.name}.md"]
    plots = {link: f"{compared.name}-{links.SPEEDS.get(link, link)}.png" for link in speeds}
    of_runs = [] if reuse else _records(compared, speeds, seeds)
    folder = results_folder(results, [*tables, *plots.values(), *of_runs], overwrite or reuse)
    records = folder / RECORDS
    with links.network(workers, delay / 1000) as network:
        measured = {of_link["link"]: of_link for of_link in measured_links(network, speeds)}
        paces = {link: compared.paces(network, link, records) for link in speeds}
    epochs = epochs or setting.epochs
    more = epochs if setting.decays else round(longer * epochs)
    others = [one for one in _methods(itertools.chain(*paces.values())) if one != (DENSE, 0)]
    curves = compared.curves([(DENSE, 0)], seeds, epochs, records)
    curves += compared.curves(others, seeds, more, records)
    texts, results_by_link = [], {}
    for link, plot_file in plots.items():
        runs = placed_on(paces[link], curves)
        to_reach = fixed_goal(runs, setting.within) if goal is None else goal
        rows = compare(runs, to_reach)
        results_by_link[link] = {"measured": measured[link], "rows": rows}
        shown = rows if seeds == 1 else [*rows, *means(rows)]
        texts.append(f"**{_said(link, measured[link])}**\n\n{markdown(trained.label, shown)}")
        plot(runs, to_reach, link, folder / plot_file)
    text = "\n".join(texts)
    what = {"task": task, "optimizer": optimizer, "workers": workers, "delay": delay}
    what |= {"local_learning_rate": local_learning_rate} if local_learning_rate else {}
    found = {"about": {"machine": processor()}, "what": what, "links": results_by_link}
    (folder / tables[0]).write_text(json.dumps(found, indent=1) + "\n")
    (folder / tables[1]).write_text(text)
    show(Console(), text, [folder / file for file in (*tables, *plots.values())])


def _said(link: str, measured: Mapping[str, Any]) -> str:
    return f"{link}, measured: {measured['Mbit/s']:.1f} Mbit/s, round trip {measured['ms']:.2f} ms"


def _records(compared: Comparison, speeds: Iterable[str], seeds: int) -> list[str]:
    """Returns the files of all runs that are known before "auto" has chosen."""
    alone = compared.timed[0].files_without_exchange
    timed = [*alone, *(f"{run.name}.json" for run in compared.timed)]
    curves = [f"{run.name}.json" for run in compared.runs([(DENSE, 0), *compared.methods], seeds)]
    folders = {**{compared.speed(link): timed for link in speeds}, CURVES: curves}
    return [f"{RECORDS}/{folder}/{file}" for folder, files in folders.items() for file in files]


if __name__ == "__main__":
    main()
