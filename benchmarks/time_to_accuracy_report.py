"""Tables and plots of the training time to a dense run's quality, new and recorded."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pictures
from losses import losses
from output import link_name, table, times
from trainings import LARGE_TRANSFORMER, Run
from turns import AUTO
from worth_it import FEWER, Model, Steps

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


def _compared(
    needed: float | None, seconds_by_method: Mapping[str, float | None]
) -> dict[str, Any]:
    """Returns the speed-up over dense and over casts, and its share of a free network's."""
    dense, cast, free = (_least(seconds_by_method, names) for names in REFERENCES)
    return {
        "times faster": dense / needed if needed and dense else None,
        "than casts": cast / needed if needed and cast else None,
        "of a free network's": free / needed if needed and free else None,
    }


def _least(seconds_by_method: Mapping[str, float | None], names: Sequence[str]) -> float | None:
    """Returns the least seconds of these methods; None if none of them reached the goal."""
    found = (seconds_by_method.get(name) for name in names)
    return min((seconds for seconds in found if seconds is not None), default=None)


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each method: means over seeds, and seconds if all reach the goal."""
    merged: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        method_rows = [row for row in rows if row["method"] == name]
        merged[name] = {
            "method": name,
            "chosen": ", ".join(dict.fromkeys(row["chosen"] for row in method_rows)),
            "seed": MEAN,
            **{key: _mean(method_rows, key) for key in ("goal", "seconds", "in the end")},
            "seconds of a step": _mean(method_rows, "seconds of a step"),
            "range": [row["seconds"] for row in method_rows],
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
                "" if factor is None else f"{factor:.1f}"
                for factor in (row["times faster"], row["than casts"])
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


def _label(method: str, chosen: str) -> str:
    return f"auto: {chosen}" if method == "auto" else method


def plot(runs: Sequence[Run], goal: float, link: str, path: Path) -> None:
    """Draws the metric over time: uncompressed, by casts and by AdaComp, or by all methods."""
    first, methods = runs[0], list(dict.fromkeys(run.method for run in runs))
    if {*pictures.SHOWN} <= {*methods}:
        methods = list(pictures.SHOWN)
    lines = {}
    for method in methods:
        found = [run for run in runs if run.method == method]
        lines[method] = (found[0].seconds, np.array([run.curve for run in found]))
    what = f"{first.task.name}, {first.optimizer}, {first.workers} workers, {link}"
    pictures.metric_over_seconds(lines, goal, first.task.label, what, path, rises=first.task.rises)


Setup: TypeAlias = Mapping[str, Any]  # a task, workers and a link, with a row for each run
Ratios: TypeAlias = Sequence[float | None]  # of each seed; None if a run never got so far


@dataclasses.dataclass(frozen=True)
class Sooner:
    """The speed-ups of a method over the baselines, in the time to an accuracy, in one setup.

    Attributes:
        method: Name of the method.
        dense: The speed-ups over dense training.
        cast: The speed-ups over 16-bit casts; empty if casts were not measured in this setup.
        free: Share of a free network's speed.
        step: Milliseconds of a step; empty if not recorded.
    """

    method: str
    dense: Ratios
    cast: Ratios
    free: Ratios
    step: str


def sooner(setup: Setup) -> Iterator[Sooner]:
    """Yields the methods of a setup, with dense training and a free network."""
    methods: dict[str, list[Mapping[str, Any]]] = {}
    for row in setup["rows"]:
        methods.setdefault(row["method"], []).append(row)
    cast_factors = [row["times faster"] for row in methods.get(CAST, ())]
    for method, rows in methods.items():
        dense = [row["times faster"] for row in rows]
        cast = [] if method == CAST or not cast_factors else list(map(_over, dense, cast_factors))
        free = [row["of a free network's"] for row in rows]
        step = rows[0]["seconds of a step"]
        yield Sooner(method, dense, cast, free, "" if step is None else f"{1e3 * step:.1f}")


def _over(mine: float | None, reference: float | None) -> float | None:
    """Returns one speed-up over another; None is a run that never reached the accuracy."""
    if mine is None:
        return None
    return mine / reference if reference else float("inf")


METHOD = "adacomp"
_COMPARED = (CAST, METHOD, FREE)
_WHERE = ("task", "workers", "link")


def count(setups: Sequence[Setup]) -> list[str]:
    """The lines of a table of each method's losses."""
    methods: dict[str, list[Sooner]] = {}
    for setup in setups:
        for row in sooner(setup):
            methods.setdefault(row.method, []).append(row)
    rows = (
        [
            method,
            losses([mean_ratio(row.dense) for row in found]),
            losses([mean_ratio(row.cast) for row in found if row.cast]),
        ]
        for method, found in methods.items()
        if method not in (DENSE, HOROVOD, FREE, AUTO)
    )
    return table(("method", "later than uncompressed", "later than 16 bits"), rows)


def mean_ratio(ratios: Ratios) -> float:
    """The mean; 0 if a seed never reached the accuracy."""
    return 0.0 if None in ratios else statistics.mean(ratios)


def speed_ups(setups: Sequence[Setup]) -> list[str]:
    """The lines of a table of how many times sooner a method is than uncompressed training."""
    rows = []
    for setup in setups:
        found = {row.method: row for row in sooner(setup)}
        ratios = [found[name].dense if name in found else () for name in _COMPARED]
        rows.append([*_place(setup), *map(_spread, ratios), _spread(found[METHOD].cast)])
    return table((*_WHERE, *_COMPARED, f"{METHOD}, sooner than 16 bits"), rows)


LARGE_WEIGHTS = 10.7e6


def large_transformer(setups: Sequence[Setup]) -> tuple[Model, dict[str, Steps]]:
    """Returns the large Transformer, and its measured steps with two workers, by link."""
    by_link, compute = {}, []
    for setup in setups:
        if (setup["task"], setup["workers"], setup["delay"]) == (LARGE_TRANSFORMER.name, 2, 0):
            seconds = {row["method"]: row["seconds of a step"] for row in setup["rows"]}
            dense = min(seconds[name] for name in REFERENCES[0] if name in seconds)
            cast = seconds.get(CAST, dense)
            by_link[setup["link"]] = Steps(dense, cast, seconds[METHOD])
            compute.append(seconds[FREE])
    free = statistics.median(compute)
    return Model(f"Transformer, if a step takes {free:.1f} s", LARGE_WEIGHTS, free, FEWER), by_link


def step_times(setups: Sequence[Setup]) -> list[str]:
    """The lines of a table of the milliseconds of a step."""
    rows = []
    for setup in setups:
        found = {row.method: row.step for row in sooner(setup)}
        rows.append([*_place(setup), *(found.get(name, "") for name in (DENSE, *_COMPARED))])
    return table((*_WHERE, "uncompressed, ms", *(f"{name}, ms" for name in _COMPARED)), rows)


def _place(setup: Setup) -> list[str]:
    return [setup["task"], str(setup["workers"]), link_name(setup["link"], setup["delay"])]


def _spread(ratios: Ratios) -> str:
    """The mean and the range over the seeds."""
    if None in ratios:
        return f"never in {ratios.count(None)} of {len(ratios)}"
    if not ratios:
        return ""
    mean = times(statistics.mean(ratios))
    return f"{mean} ({times(min(ratios))} to {times(max(ratios))})" if len(ratios) > 1 else mean
