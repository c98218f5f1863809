"""How long training takes on a slow link until it is as good as a dense run in the end.

    python benchmarks/time_to_accuracy.py digits --optimizer sgd
    python benchmarks/time_to_accuracy.py text -c adacomp -c power_sgd

The runs are those of `keras_examples/`, on two workers behind links that `tc` shapes (see
`network.py`; takes root). Time is that of the steps of training: validation is not counted. What a
compressed run has to reach is the dense run's figure at its end, as convergence.py reads it.
"""

from __future__ import annotations

import json
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
from trainings import DIGITS, RESULTS, TEXT, Bench, Run, checked_compressors

from tf_gradcomp.cli.results import results_folder, results_options

DENSE = "no_compression"
WORKERS = 2
TASKS = {task.name: task for task in (DIGITS, TEXT)}
STEPS_PER_EPOCH = 200  # of the text, which has no natural epochs


def seconds_to(run: Run, goal: float) -> float | None:
    """When the run was first as good as `goal`; None if it never was."""
    reached = run.curve >= goal if run.task.rises else run.curve <= goal
    return float(run.seconds[reached.argmax()]) if reached.any() else None


def compare(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each run: when it reached what the dense run of its seed had at its end."""
    rows = []
    dense = {run.seed: run for run in runs if run.compressor == DENSE}
    for run in runs:
        goal = dense[run.seed].quality
        needed, dense_needed = (seconds_to(one, goal) for one in (run, dense[run.seed]))
        rows.append(
            {
                "compressor": run.compressor,
                "seed": run.seed,
                "goal": goal,
                "seconds": needed,
                "times faster": dense_needed / needed if needed else None,
                "in the end": run.quality,
                "seconds of a step": float(run.seconds[-1] / run.steps[-1]),
            }
        )
    return rows


def markdown(label: str, rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        f"| compressor | seed | {label} wanted | seconds | shorter | in the end | ms a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        needed = "never" if row["seconds"] is None else f"{row['seconds']:.1f}"
        faster = "" if row["times faster"] is None else f"{row['times faster']:.1f}"
        cells = [row["compressor"], str(row["seed"]), f"{row['goal']:.3f}", needed, faster]
        cells += [f"{row['in the end']:.3f}", f"{1e3 * row['seconds of a step']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(runs: Sequence[Run], link: str, path: Path) -> None:
    """Draws the metric over time."""
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    names = list(dict.fromkeys(run.compressor for run in runs))
    for run in runs:
        label = "dense" if run.compressor == DENSE else run.compressor
        style = {"color": f"C{names.index(run.compressor)}", "alpha": 0.8}
        axis.plot(run.seconds, run.curve, label=None if run.seed else label, **style)
        if run.compressor == DENSE:
            axis.axhline(run.quality, color="black", lw=0.6)
    task = runs[0].task
    axis.set(xscale="log", xlabel="seconds of training", ylabel=task.label)
    axis.set_title(f"{task.name}, {runs[0].optimizer}, {WORKERS} workers, {link}")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


@click.command(help=__doc__, context_settings={"show_default": True})
@click.argument("task", type=click.Choice(list(TASKS)))
@click.option(
    "-c",
    "--compressor",
    "compressors",
    multiple=True,
    default=["adacomp", "scalecom"],
    callback=checked_compressors,
)
@click.option("--optimizer", default="adam", type=click.Choice(["adam", "sgd"]))
@click.option("--link", default="100 Mbit/s", type=click.Choice([*links.SPEEDS, links.UNSHAPED]))
@click.option("--seeds", default=1, help="How many: 0, 1, ...")
@click.option("--epochs", type=int, help="Of the dense run. [digits: 30; text: 20 of 200 steps]")
@click.option("--longer", default=2.0, help="How many times as many epochs compressed runs have.")
@results_options(str(RESULTS))
@click.option("--reuse", is_flag=True, help="Take runs that are there already.")
def main(
    task: str,
    compressors: Sequence[str],
    optimizer: str,
    link: str,
    seeds: int,
    epochs: int | None,
    longer: float,
    results: Path,
    overwrite: bool,
    reuse: bool,
) -> None:
    missing = links.missing()
    if missing:
        raise click.ClickException(f"{missing} Without, there are no slow links.")
    what = TASKS[task]
    epochs = epochs or (30 if what is DIGITS else 20)
    extra = [] if what is DIGITS else ["--steps-per-epoch", str(STEPS_PER_EPOCH)]
    dense, compressed = (
        [Run(what, WORKERS, optimizer, name, seed) for seed in range(seeds) for name in names]
        for names in ([DENSE], compressors)
    )
    records = Path("time-to-accuracy", links.SPEEDS.get(link, link))
    tables = [f"time-to-accuracy-{task}-{optimizer}.{suffix}" for suffix in ("json", "md", "png")]
    of_runs = [] if reuse else [f"{records}/{run.name}.json" for run in (*dense, *compressed)]
    folder = results_folder(results, [*tables, *of_runs], overwrite or reuse)
    runs: list[Run] = []
    with links.network(WORKERS) as network:
        network.shape(link)
        bench = Bench(folder / records, reuse, network, shared_out_threads(WORKERS))
        for chosen, count in ((dense, epochs), (compressed, round(longer * epochs))):
            runs += bench.run_all(chosen, ["--epochs", str(count), *extra], count)
    rows = compare(runs)
    files = [folder / table for table in tables]
    files[0].write_text(json.dumps({"link": link, "rows": rows}, indent=1) + "\n")
    text = markdown(what.label, rows)
    files[1].write_text(text)
    plot(runs, link, files[2])
    show(Console(), text, files)


if __name__ == "__main__":
    main()
