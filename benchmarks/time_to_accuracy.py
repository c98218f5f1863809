"""How long training takes on a slow link until it is as good as a dense run in the end.

    python benchmarks/time_to_accuracy.py digits --optimizer sgd
    python benchmarks/time_to_accuracy.py text -c adacomp -c power_sgd --link "1 Gbit/s"
    python benchmarks/time_to_accuracy.py transformer --workers 4

The runs are those of `keras_examples/`, on workers behind links that `tc` shapes (see `network.py`;
takes root). Time is that of the steps of training: validation is not counted. What a run has to
reach is the dense run's figure at its end, as convergence.py reads it. The Transformer's learning
rate falls to zero at the end of each run: so all its runs have as many epochs, and have to come
within 1 % of the dense run's perplexity.

A free network is the dense run with steps that exchange nothing. How long these take is measured in
the same run: as many processes train at once, each alone with its share of the batch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
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

from tf_gradcomp.cli.results import results_folder, results_options

DENSE = "no_compression"
FREE = "free network"
ALONE_EPOCHS = 2  # without exchange; the first has start-up in it
MEAN = "mean"  # of seeds


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a task is trained.

    Attributes:
        task: The task.
        epochs: Of the dense run.
        args: For the example program.
        decays: Whether the learning rate falls to zero, so that all runs have as many epochs.
        within: How near to the dense run's figure is as good, in the task's unit.
    """

    task: Task
    epochs: int
    args: Sequence[str] = ()
    decays: bool = False
    within: float = 0.0


_STEPS = ("--steps-per-epoch", "200")  # of text, which has no natural epochs
SETTINGS = {
    setting.task.name: setting
    for setting in (
        Setting(DIGITS, 30),
        Setting(TEXT, 20, _STEPS),
        Setting(TRANSFORMER, 10, _STEPS, decays=True, within=math.log2(1.01)),
    )
}


def seconds_to(run: Run, goal: float) -> float | None:
    """When the run was first as good as `goal`; None if it never was."""
    reached = run.curve >= goal if run.task.rises else run.curve <= goal
    return float(run.seconds[reached.argmax()]) if reached.any() else None


def on_free_network(dense: Run, seconds_per_step: float) -> Run:
    """What the dense run would have been with steps that take so long."""
    history = dense.record["history"]
    history = {**history, "seconds_per_step": [seconds_per_step] * len(dense.curve)}
    return dataclasses.replace(
        dense, compressor=FREE, record={**dense.record, "history": history, "compressor": FREE}
    )


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
    """How many times sooner than dense; and that, over what a free network would give."""
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
@click.option("--link", default="100 Mbit/s", type=click.Choice([*links.SPEEDS, links.UNSHAPED]))
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
    link: str,
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
    epochs = epochs or setting.epochs
    dense, compressed = (
        [Run(what, workers, optimizer, name, seed) for seed in range(seeds) for name in names]
        for names in ([DENSE], compressors)
    )
    speed = links.SPEEDS.get(link, link)
    records = Path("time-to-accuracy", speed)
    name = f"time-to-accuracy-{task}-{optimizer}-{workers}workers-{speed}"
    tables = [f"{name}.{suffix}" for suffix in ("json", "md", "png")]
    written = [f"{run.name}.json" for run in (*dense, *compressed)]
    written += dense[0].files_without_exchange
    of_runs = [] if reuse else [f"{records}/{file}" for file in written]
    folder = results_folder(results, [*tables, *of_runs], overwrite or reuse)
    runs: list[Run] = []
    with links.network(workers) as network:
        network.shape(link)
        bench = Bench(folder / records, reuse, network, shared_out_threads(workers))
        alone = ["--epochs", str(ALONE_EPOCHS), *setting.args]
        seconds = bench.without_exchange(dense[0], alone)
        for chosen, count in (
            (dense, epochs),
            (compressed, epochs if setting.decays else round(longer * epochs)),
        ):
            runs += bench.run_all(chosen, ["--epochs", str(count), *setting.args], count)
    free = [on_free_network(run, seconds) for run in runs[: len(dense)]]
    runs[len(dense) : len(dense)] = free
    rows = compare(runs, setting.within)
    files = [folder / table for table in tables]
    files[0].write_text(json.dumps({"link": link, "rows": rows}, indent=1) + "\n")
    text = markdown(what.label, rows if seeds == 1 else [*rows, *means(rows)])
    files[1].write_text(text)
    plot(runs, link, files[2])
    show(Console(), text, files)


if __name__ == "__main__":
    main()
