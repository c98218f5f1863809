"""Measures how long training takes on a slow link to become as good as a finished dense run.

    python benchmarks/time_to_accuracy.py digits --optimizer sgd
    python benchmarks/time_to_accuracy.py text -c adacomp --link "100 Mbit/s" --link "1 Gbit/s"
    python benchmarks/time_to_accuracy.py transformer --workers 4 --seeds 3

The runs train the programs of `keras_examples/`. The benchmark first times the first steps of a run
on each link, with workers behind links that `tc` shapes (see `network.py`; needs root). It then
measures the quality of a run after each number of steps in whole runs over the loopback, once,
because the quality is the same on every link. The training time is the number of steps times the
seconds per step, without validation and start-up. Only the first part needs an idle machine.

A run has to reach the figure of the dense run at its end, as convergence.py reads the figure. The
Transformer's learning rate falls to zero at the end of each run. So all runs of the Transformer
have the same number of epochs, and have to come within 1 % of the dense run's perplexity.

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
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import links
import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from output import show
from placed import shared_out_threads
from rich.console import Console
from trainings import DIGITS, RESULTS, TEXT, TRANSFORMER, Bench, Run, Task, checked_compressors

from tf_gradcomp.cli.options import results_folder, results_options

DENSE = "no_compression"
FREE = "free network"
MEAN = "mean"  # of seeds
RECORDS, CURVES = "time-to-accuracy", "curves"  # folders of records, one in the other


@dataclasses.dataclass(frozen=True)
class Setting:
    """Training settings of a task.

    Attributes:
        task: The task.
        epochs: Number of epochs of the dense run.
        timed: Number of epochs after which a step takes as long as in most of a run. AdaComp sends
            more in the first epochs.
        args: Arguments of the example program.
        decays: Whether the learning rate falls to zero, so that all runs have equally many epochs.
        within: Distance from the dense run's figure that is still as good, in the task's unit.
    """

    task: Task
    epochs: int
    timed: int
    args: Sequence[str] = ()
    decays: bool = False
    within: float = 0.0


_STEPS = ("--steps-per-epoch", "200")  # of text, which has no natural epochs
SETTINGS = {
    setting.task.name: setting
    for setting in (
        Setting(DIGITS, 30, 10),
        Setting(TEXT, 20, 2, _STEPS),
        Setting(TRANSFORMER, 10, 2, _STEPS, decays=True, within=math.log2(1.01)),
    )
}


def seconds_to(run: Run, goal: float) -> float | None:
    """When the run was first as good as `goal`; None if it never was."""
    reached = run.curve >= goal if run.task.rises else run.curve <= goal
    return float(run.seconds[reached.argmax()]) if reached.any() else None


@dataclasses.dataclass(frozen=True)
class Pace:
    """Speed at which a method trains on a link.

    Attributes:
        compressor: The requested compressor.
        chosen: The method that was used; for `auto`, its choice.
        seconds: Seconds per step.
    """

    compressor: str
    chosen: str
    seconds: float


def at_pace(curve: Run, pace: Pace) -> Run:
    """Returns the run as if each of its steps had taken `pace.seconds`."""
    history = {**curve.record["history"], "seconds_per_step": [pace.seconds] * len(curve.curve)}
    record = {**curve.record, "history": history, "compressor": pace.chosen}
    return dataclasses.replace(curve, compressor=pace.compressor, record=record)


def compare(runs: Sequence[Run], within: float = 0.0) -> list[dict[str, Any]]:
    """A row for each run: when it reached what the dense run of its seed had at its end.

    Args:
        runs: Those of each seed, with its dense run and that on a free network.
        within: How near to the dense run's figure is as good.
    """
    rows = []
    by_name = {(run.compressor, run.seed): run for run in runs}
    for run in runs:
        dense, free = by_name[DENSE, run.seed], by_name[FREE, run.seed]
        goal = dense.quality + (-within if run.task.rises else within)
        needed = seconds_to(run, goal)
        row = {
            "compressor": run.compressor,
            "chosen": run.chosen,
            "seed": run.seed,
            "goal": goal,
            "seconds": needed,
            **_beside(needed, seconds_to(dense, goal), seconds_to(free, goal)),
            "in the end": run.quality,
            "seconds of a step": float(run.seconds[-1] / run.steps[-1]),
        }
        rows.append(row)
    return rows


def _beside(needed: float | None, dense: float | None, free: float | None) -> dict[str, Any]:
    """Returns the speed-up over dense, and its share of a free network's speed-up."""
    return {
        "times faster": dense / needed if needed and dense else None,
        "of a free network's": free / needed if needed and free else None,
    }


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each compressor: means over the seeds, of seconds if it is as good in all."""
    merged: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["compressor"] for row in rows):
        some = [row for row in rows if row["compressor"] == name]
        merged[name] = {
            "compressor": name,
            "chosen": ", ".join(dict.fromkeys(row["chosen"] for row in some)),
            "seed": MEAN,
            **{key: _mean(some, key) for key in ("goal", "seconds", "in the end")},
            "seconds of a step": _mean(some, "seconds of a step"),
        }
    dense, free = (merged[name]["seconds"] for name in (DENSE, FREE))
    return [{**row, **_beside(row["seconds"], dense, free)} for row in merged.values()]


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows]
    return None if None in values else statistics.mean(values)


def markdown(label: str, rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        f"| compressor | seed | {label} wanted | seconds | shorter | of a free network's, % "
        "| in the end | ms a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        needed = "never" if row["seconds"] is None else f"{row['seconds']:.1f}"
        faster = "" if row["times faster"] is None else f"{row['times faster']:.1f}"
        share = row["of a free network's"]
        of_free = "" if share is None else f"{100 * share:.0f}"
        cells = [
            _label(row["compressor"], row["chosen"]),
            str(row["seed"]),
            f"{row['goal']:.3f}",
            needed,
            faster,
            of_free,
        ]
        cells += [f"{row['in the end']:.3f}", f"{1e3 * row['seconds of a step']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _label(compressor: str, chosen: str) -> str:
    return f"auto: {chosen}" if compressor == "auto" else compressor


def plot(runs: Sequence[Run], link: str, path: Path) -> None:
    """Draws the metric over time."""
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    names = list(dict.fromkeys(run.compressor for run in runs if run.compressor != FREE))
    for run in runs:
        label = "dense" if run.compressor == DENSE else _label(run.compressor, run.chosen)
        if run.compressor == FREE:
            label, style = "dense, on a free network", {"color": "gray", "ls": "--"}
        else:
            style = {"color": f"C{names.index(run.compressor)}", "alpha": 0.8}
        axis.plot(run.seconds, run.curve, label=None if run.seed else label, **style)
        if run.compressor == DENSE:
            axis.axhline(run.quality, color="black", lw=0.6)
    one = runs[0]
    axis.set(xscale="log", xlabel="seconds of training", ylabel=one.task.label)
    axis.set_title(f"{one.task.name}, {one.optimizer}, {one.workers} workers, {link}")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison of compressors with dense training on one task.

    Attributes:
        setting: The training settings of the task.
        workers: Number of workers, each with an equal share of the batch.
        optimizer: Name of the optimizer, as the program takes it.
        compressors: The compressors to compare with dense training.
        reuse: Whether to reuse existing records.
    """

    setting: Setting
    workers: int
    optimizer: str
    compressors: Sequence[str]
    reuse: bool

    @property
    def name(self) -> str:
        """Prefix of the names of the comparison's files."""
        return f"time-to-accuracy-{self.setting.task.name}-{self.optimizer}-{self.workers}workers"

    def runs(self, compressors: Iterable[str], seeds: int = 1) -> list[Run]:
        """The runs of these methods with so many seeds."""
        return [
            Run(self.setting.task, self.workers, self.optimizer, name, seed)
            for name in compressors
            for seed in range(seeds)
        ]

    @property
    def timed(self) -> list[Run]:
        """Runs that are timed on each link, the dense run first."""
        return self.runs(dict.fromkeys([DENSE, *self.compressors]))

    def paces(self, network: links.Network, link: str, records: Path) -> list[Pace]:
        """Measures the speed of all methods on a link, and of training on a free network."""
        network.shape(link)
        bench = Bench(records / _speed(link), self.reuse, network, self._threads)
        count = self.setting.timed
        args = ["--epochs", str(count), *self.setting.args]
        free = bench.without_exchange(self.timed[0], args)
        return [
            *(
                Pace(run.compressor, run.chosen, run.seconds_per_step)
                for run in bench.run_all(self.timed, args, count)
            ),
            Pace(FREE, FREE, free),
        ]

    def curves(
        self, compressors: Iterable[str], seeds: int, epochs: int, records: Path
    ) -> list[Run]:
        """Whole runs of these methods over the loopback, where nothing is timed."""
        bench = Bench(records / CURVES, self.reuse, threads=self._threads)
        args = ["--epochs", str(epochs), *self.setting.args]
        return bench.run_all(self.runs(compressors, seeds), args, epochs)

    @property
    def _threads(self) -> int:
        return shared_out_threads(self.workers)


def placed_on(link: Sequence[Pace], curves: Sequence[Run]) -> list[Run]:
    """The runs of a link: each method's curves, at its pace there."""
    by_method = {name: [run for run in curves if run.compressor == name] for name in _methods(link)}
    return [at_pace(run, pace) for pace in link for run in by_method[_method(pace)]]


def _methods(paces: Iterable[Pace]) -> list[str]:
    return list(dict.fromkeys(map(_method, paces)))


def _method(pace: Pace) -> str:
    """Whose curve it is."""
    return DENSE if pace.compressor == FREE else pace.chosen


def _speed(link: str) -> str:
    return links.SPEEDS.get(link, link)


_EPOCHS = "Of the dense run. [digits: 30; text: 20 of 200 steps; transformer: 10 of 200]"
_LONGER = "How many times as many epochs compressed runs have; the Transformer's have as many."


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
@click.option("--workers", default=2, type=click.IntRange(min=2), help="Each has an equal share.")
@click.option("--optimizer", help="adam or sgd; the Transformer has adamw.  [default: the first]")
@click.option(
    "--link",
    "speeds",
    multiple=True,
    default=["100 Mbit/s"],
    type=click.Choice([*links.SPEEDS, links.UNSHAPED]),
)
@click.option("--seeds", default=1, help="How many: 0, 1, ...")
@click.option("--epochs", type=int, help=_EPOCHS)
@click.option("--longer", default=2.0, help=_LONGER)
@results_options(str(RESULTS))
@click.option("--reuse", is_flag=True, help="Take runs that are there already.")
def main(
    task: str,
    compressors: Sequence[str],
    workers: int,
    optimizer: str | None,
    speeds: Sequence[str],
    seeds: int,
    epochs: int | None,
    longer: float,
    results: Path,
    overwrite: bool,
    reuse: bool,
) -> None:
    setting = SETTINGS[task]
    what = setting.task
    optimizer = optimizer or what.optimizers[0]
    if optimizer not in what.optimizers:
        raise click.UsageError(f"{task} is trained by {' or '.join(what.optimizers)}.")
    if what.batch_size % workers:
        raise click.UsageError(f"{workers} workers cannot share {what.batch_size} rows equally.")
    missing = links.missing()
    if missing:
        raise click.ClickException(f"{missing} Without, there are no slow links.")
    compared = Comparison(setting, workers, optimizer, compressors, reuse)
    tables = [f"{compared.name}.json", f"{compared.name}.md"]
    plots = {link: f"{compared.name}-{_speed(link)}.png" for link in speeds}
    of_runs = [] if reuse else _records(compared, speeds, seeds)
    folder = results_folder(results, [*tables, *plots.values(), *of_runs], overwrite or reuse)
    records = folder / RECORDS
    with links.network(workers) as network:
        paces = {link: compared.paces(network, link, records) for link in speeds}
    epochs = epochs or setting.epochs
    more = epochs if setting.decays else round(longer * epochs)
    others = [name for name in _methods(itertools.chain(*paces.values())) if name != DENSE]
    curves = compared.curves([DENSE], seeds, epochs, records)
    curves += compared.curves(others, seeds, more, records)
    texts, rows = [], {}
    for link, plot_file in plots.items():
        runs = placed_on(paces[link], curves)
        rows[link] = compare(runs, setting.within)
        shown = rows[link] if seeds == 1 else [*rows[link], *means(rows[link])]
        texts.append(f"**{link}**\n\n{markdown(what.label, shown)}")
        plot(runs, link, folder / plot_file)
    text = "\n".join(texts)
    (folder / tables[0]).write_text(json.dumps(rows, indent=1) + "\n")
    (folder / tables[1]).write_text(text)
    show(Console(), text, [folder / file for file in (*tables, *plots.values())])


def _records(compared: Comparison, speeds: Iterable[str], seeds: int) -> list[str]:
    """The files of all runs that are known before "auto" has chosen."""
    alone = compared.timed[0].files_without_exchange
    timed = [*alone, *(f"{run.name}.json" for run in compared.timed)]
    curves = [f"{run.name}.json" for run in compared.runs([DENSE, *compared.compressors], seeds)]
    folders = {**{_speed(link): timed for link in speeds}, CURVES: curves}
    return [f"{RECORDS}/{folder}/{file}" for folder, files in folders.items() for file in files]


if __name__ == "__main__":
    main()
