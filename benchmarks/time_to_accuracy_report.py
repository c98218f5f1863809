"""The table and the plots of the training time to a dense run's quality."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from trainings import Run

from tf_gradcomp.cli.plots import COLOURS, DPI, GREY, WIDTH, label_places

DENSE = "no_compression"
HOROVOD = "Horovod"  # dense: each gradient is sent while the others are still computed
CAST = "cast"
FREE = "free network"
MEAN = "mean"  # the file of figures over seeds
# What other methods are compared with: the best of the dense steps, casts, and a free network.
REFERENCES = ((DENSE, HOROVOD), (CAST,), (FREE,))


def seconds_to(run: Run, goal: float) -> float | None:
    """Returns when the run first reached `goal`; None if it never did."""
    reached = run.curve >= goal if run.task.rises else run.curve <= goal
    return float(run.seconds[reached.argmax()]) if reached.any() else None


def fixed_goal(runs: Sequence[Run], within: float = 0.0) -> float:
    """Returns the worst final figure of the dense runs over the seeds.

    Args:
        runs: All runs.
        within: The largest distance from that figure that counts as equally good.
    """
    finals = [run.quality for run in runs if run.method == DENSE]
    return min(finals) - within if runs[0].task.rises else max(finals) + within


def compare(runs: Sequence[Run], goal: float) -> list[dict[str, Any]]:
    """Returns a row for each run, with the time at which it reached the goal.

    Args:
        runs: The runs of each seed, including the dense run, the run on a free network, and the run
            with casts, if any.
        goal: The figure to reach, the same for all runs.
    """
    rows = []
    by_seed: dict[int, dict[str, float | None]] = {run.seed: {} for run in runs}
    for run in runs:
        by_seed[run.seed][run.method] = seconds_to(run, goal)
    for run in runs:
        needed = seconds_to(run, goal)
        row = {
            "method": run.method,
            "chosen": run.chosen,
            "seed": run.seed,
            "goal": goal,
            "seconds": needed,
            **_compared(needed, by_seed[run.seed]),
            "in the end": run.quality,
            "seconds of a step": float(run.seconds[-1] / run.steps[-1]),
        }
        rows.append(row)
    return rows


def _compared(needed: float | None, of_methods: Mapping[str, float | None]) -> dict[str, Any]:
    """Returns the speed-up over dense and over casts, and its share of a free network's."""
    dense, cast, free = (_least(of_methods, names) for names in REFERENCES)
    return {
        "times faster": dense / needed if needed and dense else None,
        "than casts": cast / needed if needed and cast else None,
        "of a free network's": free / needed if needed and free else None,
    }


def _least(of_methods: Mapping[str, float | None], names: Sequence[str]) -> float | None:
    """Returns the least seconds of these methods; None if none of them reached the goal."""
    found = (of_methods.get(name) for name in names)
    return min((seconds for seconds in found if seconds is not None), default=None)


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each method: means over seeds, and seconds if all reach the goal."""
    merged: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        some = [row for row in rows if row["method"] == name]
        merged[name] = {
            "method": name,
            "chosen": ", ".join(dict.fromkeys(row["chosen"] for row in some)),
            "seed": MEAN,
            **{key: _mean(some, key) for key in ("goal", "seconds", "in the end")},
            "seconds of a step": _mean(some, "seconds of a step"),
            "range": [row["seconds"] for row in some],
        }
    seconds = {name: row["seconds"] for name, row in merged.items()}
    return [{**row, **_compared(row["seconds"], seconds)} for row in merged.values()]


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows]
    return None if None in values else statistics.mean(values)


def markdown(label: str, rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        f"| method | seed | {label} wanted | seconds | times sooner than dense | than casts "
        "| of a free network's, % | in the end | ms a step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = row["of a free network's"]
        cells = [
            _label(row["method"], row["chosen"]),
            str(row["seed"]),
            f"{row['goal']:.3f}",
            _needed(row),
            *(
                "" if one is None else f"{one:.1f}"
                for one in (row["times faster"], row["than casts"])
            ),
            "" if share is None else f"{100 * share:.0f}",
        ]
        cells += [f"{row['in the end']:.3f}", f"{1e3 * row['seconds of a step']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _needed(row: dict[str, Any]) -> str:
    """Returns the seconds, and their range over the seeds."""
    if row["seconds"] is None:
        return "never"
    every = row.get("range", ())
    between = f" ({min(every):.1f} to {max(every):.1f})" if len(every) > 1 else ""
    return f"{row['seconds']:.1f}{between}"


_DENSE_LABELS = {DENSE: "dense", HOROVOD: "dense, by Horovod"}


def _label(method: str, chosen: str) -> str:
    return f"auto: {chosen}" if method == "auto" else method


def plot(runs: Sequence[Run], goal: float, link: str, path: Path) -> None:
    """Draws the metric over time: the mean and the range of the seeds of each method."""
    one = runs[0]
    figure, axis = plt.subplots(figsize=(WIDTH, 0.65 * WIDTH), layout="constrained")
    axis.set(xscale="log", xlabel="seconds of training", ylabel=one.task.label)
    axis.set_title(f"{one.task.name}, {one.optimizer}, {one.workers} workers, {link}")
    axis.axhline(goal, color="black", lw=0.8)
    methods = list(dict.fromkeys(run.method for run in runs))
    reached = []
    for method in methods:
        some = [run for run in runs if run.method == method]
        curves = np.array([run.curve for run in some])
        colour = GREY if method == FREE else COLOURS[methods.index(method) % len(COLOURS)]
        style = "--" if method == FREE else "-"
        axis.plot(some[0].seconds, curves.mean(0), style, color=colour)
        axis.fill_between(some[0].seconds, curves.min(0), curves.max(0), color=colour, alpha=0.15)
        label = _DENSE_LABELS.get(method) or _label(method, some[0].chosen)
        seconds = [seconds_to(run, goal) for run in some]
        if None in seconds:
            axis.plot([], [], style, color=colour, label=f"{label}: never in {seconds.count(None)}")
        else:
            reached.append((statistics.mean(seconds), label, colour))
    axis.grid(alpha=0.3)
    label_places(axis, [(x, f"{label}: {x:.3g} s", colour) for x, label, colour in reached])
    if len(reached) < len(methods):
        axis.legend(fontsize=9)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
