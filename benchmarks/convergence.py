"""Trains dense and compressed, with the same steps, settings and seeds, and compares.

    python benchmarks/convergence.py digits --workers 2 --workers 4 --optimizer adam --optimizer sgd
    python benchmarks/convergence.py text --workers 4 --steps 4000 --seeds 1

The programs of `benchmarks/programs/` train in real worker processes on this machine, one job at a
time. The measurements, the table and the curves go to `results/`.

Three ratios are given, whose differences docs/methods.md explains:

- payload: bytes of the gradients as float32, divided by the bytes of the whole payload; - paper: as
the AdaComp paper counts, with 8 or 16 bits for each sent element and one float32 for each layer.
This benchmark counts codes instead of sent elements. An empty bin also has a code, and a layer has
up to three bytes of padding, so the ratio is slightly too low; - wire: bytes that a worker sends in
a dense ring all-reduce, divided by the bytes that it sends with the method.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pictures
from output import show
from trainings import DIGITS, RESULTS, TEXT, Bench, Run, Task, checked_compressors

from tf_gradcomp.cli.options import results_folder, results_options

DENSE = "no_compression"


def compare(task: Task, runs: Sequence[Run], dense: str, compressed: str) -> list[dict[str, Any]]:
    """A row for each number of workers and optimizer: means and deviations over the seeds."""
    rows = []
    for workers, optimizer in dict.fromkeys((run.workers, run.optimizer) for run in runs):
        chosen = [run for run in runs if (run.workers, run.optimizer) == (workers, optimizer)]
        dense_runs, compressed_runs = (
            [run for run in chosen if run.compressor == compressor]
            for compressor in (dense, compressed)
        )
        thirds = {
            f"{label} at {part}/3": [
                run.curve[max(1, len(run.curve) * part // 3) - 1] for run in runs_of_kind
            ]
            for part in (1, 2, 3)
            for label, runs_of_kind in ((dense, dense_runs), (compressed, compressed_runs))
        }
        rows.append(
            {
                "workers": workers,
                "optimizer": optimizer,
                "seeds": len(dense_runs),
                "dense": _mean_and_deviation([run.quality for run in dense_runs]),
                "compressed": _mean_and_deviation([run.quality for run in compressed_runs]),
                "difference": _mean_and_deviation(
                    [
                        b.quality - a.quality
                        for a, b in zip(dense_runs, compressed_runs, strict=True)
                    ]
                ),
                "payload_ratio": _mean_and_deviation(
                    [run.payload_ratio for run in compressed_runs]
                ),
                "paper_ratio": _mean_and_deviation([run.paper_ratio() for run in compressed_runs]),
                "paper_ratio_by_kind": {
                    kind: statistics.mean(run.paper_ratio(kind) for run in compressed_runs)
                    for kind in _kinds(compressed_runs[0])
                },
                "wire_ratio": _mean_and_deviation([run.wire_ratio for run in compressed_runs]),
                "curve": {name: statistics.mean(values) for name, values in thirds.items()},
            }
        )
    return rows


def _kinds(run: Run) -> list[str]:
    traffic = run.record["traffic"]
    if not traffic:
        return []
    return sorted({variable["kind"] for variable in traffic["variables"].values()})


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def markdown(task: Task, rows: Sequence[dict[str, Any]], compressed: str) -> list[str]:
    """The table, as lines of Markdown."""
    lines = [
        f"| workers | optimizer | seeds | dense, {task.label} | {compressed} | difference "
        "| payload ratio | paper's count | wire ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(_cells(task, row)) + " |" for row in rows]
    return lines


def _cells(task: Task, row: dict[str, Any]) -> list[str]:
    def quality(name: str, sign: str = "") -> str:
        mean, deviation = row[name]
        spread = f" ± {deviation:.{task.digits}f}" if row["seeds"] > 1 else ""
        return f"{mean:{sign}.{task.digits}f}{spread}"

    return [
        str(row["workers"]),
        row["optimizer"],
        str(row["seeds"]),
        quality("dense"),
        quality("compressed"),
        quality("difference", "+"),
        *(f"{row[name][0]:.0f}" for name in ("payload_ratio", "paper_ratio", "wire_ratio")),
    ]


def draw(task: Task, runs: Sequence[Run], path: Path) -> None:
    """Draws the metric over steps and over bytes, of the first number of workers and optimizer."""
    workers, optimizer = runs[0].workers, runs[0].optimizer
    chosen = [run for run in runs if (run.workers, run.optimizer) == (workers, optimizer)]
    lines = {}
    for method in dict.fromkeys(run.compressor for run in chosen):
        found = [run for run in chosen if run.compressor == method]
        sent = np.mean([run.sent_bytes for run in found], axis=0)
        lines[method] = (found[0].steps, sent, np.array([run.curve for run in found]))
    what = f"{task.name}, {workers} workers, {optimizer}"
    lowest = 80 if task == DIGITS else None  # the first epochs would hide the differences
    pictures.over_steps_and_bytes(lines, task.label, what, "", path, lowest)


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Compare training with and without compression."""


_OPTIMIZERS = click.Choice(["adam", "sgd"])


def _job_options(default_workers: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in (
            click.option("--workers", multiple=True, default=[default_workers], type=int),
            click.option("--optimizer", multiple=True, default=["adam"], type=_OPTIMIZERS),
            click.option("--seeds", default=3, help="How many: 0, 1, ..."),
            click.option("--compressor", default="adacomp", callback=checked_compressors),
            click.option("--precondition", default="auto", type=click.Choice(["auto", "none"])),
            results_options(str(RESULTS)),
            click.option("--reuse", is_flag=True, help="Reuse existing runs."),
        ):
            command = option(command)
        return command

    return add


@main.command()
@_job_options(default_workers=2)
@click.option("--epochs", default=30)
def digits(epochs: int, **options: Any) -> None:
    """The convolutional network on handwritten digits."""
    _measure(DIGITS, ["--epochs", str(epochs)], epochs, **options)


@main.command()
@_job_options(default_workers=4)
@click.option("--steps", default=4000)
@click.option("--steps-per-epoch", default=200)
def text(steps: int, steps_per_epoch: int, **options: Any) -> None:
    """The character-level LSTM."""
    epochs = steps // steps_per_epoch
    args = ["--epochs", str(epochs), "--steps-per-epoch", str(steps_per_epoch)]
    _measure(TEXT, args, epochs, **options)


def _measure(
    task: Task,
    args: Sequence[str],
    epochs: int,
    *,
    workers: Sequence[int],
    optimizer: Sequence[str],
    seeds: int,
    compressor: str,
    precondition: str,
    results: Path,
    overwrite: bool,
    reuse: bool,
) -> None:
    runs = [
        Run(task, count, name, method, seed)
        for count in dict.fromkeys(workers)
        for name in dict.fromkeys(optimizer)
        for seed in range(seeds)
        for method in (DENSE, compressor)
    ]
    tables = [f"convergence-{task.name}.{suffix}" for suffix in ("json", "md", "png")]
    records = [] if reuse else [f"convergence/{run.name}.json" for run in runs]
    folder = results_folder(results, [*tables, *records], overwrite or reuse)
    bench = Bench(folder / "convergence", reuse)
    runs = bench.run_all(runs, [*args, "--precondition", precondition], epochs)
    rows = compare(task, runs, DENSE, compressor)
    files = [folder / table for table in tables]
    files[0].write_text(json.dumps(rows, indent=1) + "\n")
    table = "\n".join(markdown(task, rows, compressor)) + "\n"
    files[1].write_text(table)
    draw(task, runs, files[2])
    show(bench.console, table, files)


if __name__ == "__main__":
    main()
