"""The table and the plots of the time that training takes to become as good as a dense run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from trainings import Run

DENSE = "no_compression"
FREE = "free network"
MEAN = "mean"  # of seeds


def seconds_to(run: Run, goal: float) -> float | None:
    """When the run was first as good as `goal`; None if it never was."""
    reached = run.curve >= goal if run.task.rises else run.curve <= goal
    return float(run.seconds[reached.argmax()]) if reached.any() else None


def compare(runs: Sequence[Run], within: float = 0.0) -> list[dict[str, Any]]:
    """A row for each run: when it reached what the dense run of its seed had at its end.

    Args:
        runs: Those of each seed, with its dense run and that on a free network.
        within: How near to the dense run's figure is as good.
    """
    rows = []
    by_name = {(run.method, run.seed): run for run in runs}
    for run in runs:
        dense, free = by_name[DENSE, run.seed], by_name[FREE, run.seed]
        goal = dense.quality + (-within if run.task.rises else within)
        needed = seconds_to(run, goal)
        row = {
            "method": run.method,
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
    """A row for each method: means over the seeds, of seconds if it is as good in all."""
    merged: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        some = [row for row in rows if row["method"] == name]
        merged[name] = {
            "method": name,
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
        f"| method | seed | {label} wanted | seconds | shorter | of a free network's, % "
        "| in the end | ms a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        needed = "never" if row["seconds"] is None else f"{row['seconds']:.1f}"
        faster = "" if row["times faster"] is None else f"{row['times faster']:.1f}"
        share = row["of a free network's"]
        of_free = "" if share is None else f"{100 * share:.0f}"
        cells = [
            _label(row["method"], row["chosen"]),
            str(row["seed"]),
            f"{row['goal']:.3f}",
            needed,
            faster,
            of_free,
        ]
        cells += [f"{row['in the end']:.3f}", f"{1e3 * row['seconds of a step']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _label(method: str, chosen: str) -> str:
    return f"auto: {chosen}" if method == "auto" else method


def plot(runs: Sequence[Run], link: str, path: Path) -> None:
    """Draws the metric over time."""
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    names = list(dict.fromkeys(run.method for run in runs if run.method != FREE))
    for run in runs:
        label = "dense" if run.method == DENSE else _label(run.method, run.chosen)
        if run.method == FREE:
            label, style = "dense, on a free network", {"color": "gray", "ls": "--"}
        else:
            style = {"color": f"C{names.index(run.method)}", "alpha": 0.8}
        axis.plot(run.seconds, run.curve, label=None if run.seed else label, **style)
        if run.method == DENSE:
            axis.axhline(run.quality, color="black", lw=0.6)
    one = runs[0]
    axis.set(xscale="log", xlabel="seconds of training", ylabel=one.task.label)
    axis.set_title(f"{one.task.name}, {one.optimizer}, {one.workers} workers, {link}")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
