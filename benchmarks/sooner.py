"""Tables of the time to a fixed accuracy, compared with dense training and 16-bit casts."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from checklist import losses, times
from network_report import table
from records import PACES
from time_to_accuracy_report import CAST, DENSE, FREE, HOROVOD

Setup: TypeAlias = Mapping[str, Any]  # a task, workers and a link, with a row for each run
Ratios: TypeAlias = Sequence[
    float | None
]  # one for each seed; None if the run never reached the accuracy


@dataclasses.dataclass(frozen=True)
class Sooner:
    """The speed-ups of a method over the baselines, in the time to an accuracy, in one setup.

    Attributes:
        method: Name of the method.
        dense: The speed-ups over dense training.
        cast: The speed-ups over 16-bit casts; empty if casts were not measured in this setup.
        free: Share of a free network's speed.
        step: Seconds of a step; None if not recorded.
    """

    method: str
    dense: Ratios
    cast: Ratios
    free: Ratios
    step: float | None

    @property
    def cells(self) -> list[str]:
        """Returns the cells of a table: means, and ranges over the seeds."""
        free = "" if None in self.free else f"{statistics.mean(self.free):.0%}"
        step = "" if self.step is None else f"{1e3 * self.step:.1f}"
        return [_spread(self.dense), _spread(self.cast), free, step]


def sooner(setup: Setup) -> Iterator[Sooner]:
    """Yields the methods of a setup, with dense training and a free network."""
    methods: dict[str, list[Mapping[str, Any]]] = {}
    for row in setup["rows"]:
        methods.setdefault(row["method"], []).append(row)
    of_casts = [row["times faster"] for row in methods.get(CAST, ())]
    for method, rows in methods.items():
        dense = [row["times faster"] for row in rows]
        cast = [] if method == CAST or not of_casts else list(map(_over, dense, of_casts))
        free = [row["of a free network's"] for row in rows]
        yield Sooner(method, dense, cast, free, rows[0]["seconds of a step"])


def _over(mine: float | None, other: float | None) -> float | None:
    """Returns one speed-up over another; None is a run that never reached the accuracy."""
    if mine is None:
        return None
    return mine / other if other else float("inf")


_COUNT = ("method", "later than dense", "than 16 bits")


def count(setups: Sequence[Setup]) -> Iterator[str]:
    """Yields the lines that count the setups, and each method's losses in them."""
    methods: dict[str, list[Sooner]] = {}
    for setup in setups:
        for one in sooner(setup):
            methods.setdefault(one.method, []).append(one)
    tasks = len({setup["task"] for setup in setups})
    yield f"**{len(setups)} setups of whole trainings** were measured, of {tasks} tasks."
    yield ""
    yield from table(
        _COUNT,
        (
            [
                method,
                losses([mean(one.dense) for one in found]),
                losses([mean(one.cast) for one in found if one.cast]),
            ]
            for method, found in methods.items()
            if method not in (DENSE, HOROVOD, FREE)
        ),
    )


def mean(ratios: Ratios) -> float:
    """Returns the mean; 0 if a seed never reached the accuracy."""
    return 0.0 if None in ratios else statistics.mean(ratios)


_COLUMNS = (
    "task",
    "workers",
    "link",
    "method",
    "times sooner than dense",
    "than 16 bits",
    "of a free network's speed",
    "ms a step",
)


_GOAL = "means over the seeds, with their range; all runs have to reach one figure"


def details(setups: Sequence[Setup]) -> Iterator[str]:
    """Yields the lines of a table of methods and setups, for each machine and way of measuring."""
    of_about: dict[str, list[Setup]] = {}
    for setup in setups:
        of_about.setdefault(_measured(setup["about"]), []).append(setup)
    for about, some in of_about.items():
        yield from ("", about, "", *table(_COLUMNS, _rows(some)))


def _measured(about: Mapping[str, Any]) -> str:
    """Returns a sentence on the machine, and what the figures are."""
    timed = about.get(PACES)
    where = f"steps were timed on {timed['machine']}, and trained on" if timed else "on"
    sentence = f"{where} {about['machine']}: {about.get('rows', _GOAL)}."
    return sentence[0].upper() + sentence[1:]


def _rows(setups: Sequence[Setup]) -> Iterator[list[str]]:
    for setup in setups:
        for one in sooner(setup):
            name = [setup["task"], str(setup["workers"]), setup["link"], one.method]
            yield [*name, *one.cells]


def _spread(ratios: Ratios) -> str:
    """The mean and the range over the seeds."""
    if None in ratios:
        return f"never in {ratios.count(None)} of {len(ratios)}"
    if not ratios:
        return ""
    mean = times(statistics.mean(ratios))
    return f"{mean} ({times(min(ratios))} to {times(max(ratios))})" if len(ratios) > 1 else mean
