"""Figures of the first pages, which compare AdaComp with dense steps and 16-bit casts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jobs
import sooner
from checklist import times
from network_report import table
from setups import CASTS, Setup
from worth_it import METHOD, NAMES

LINKS = ("100 Mbit/s", "1 Gbit/s")
TASKS = {
    "digits": "the digits network",
    "transformer": "a small Transformer",
    "text": "a character LSTM",
}
_COLUMNS = ("AdaComp, two workers", *LINKS)


def findings(found: Sequence[Setup], trained: Sequence[Mapping[str, Any]]) -> list[str]:
    """Yields the lines of a table of steps and whole trainings."""
    of_two = [s for s in found if s.workers == 2 and METHOD in s.records]
    rows = [
        [f"a step: {NAMES[job]}", *(_step(of_two, job, link) for link in LINKS)]
        for job in dict.fromkeys(setup.job for setup in of_two)
    ]
    rows += [
        [f"to dense accuracy: {name}", *(_training(trained, task, link) for link in LINKS)]
        for task, name in TASKS.items()
    ]
    return table(_COLUMNS, rows)


def _step(found: Sequence[Setup], job: str, link: str) -> str:
    ratios = (over_baselines(s) for s in found if (s.job, s.link) == (job, link))
    return next((f"{times(dense)} ({times(cast)})" for dense, cast in ratios), "")


def _training(trained: Sequence[Mapping[str, Any]], task: str, link: str) -> str:
    of_link = (s for s in trained if (s["task"], s["workers"], s["link"]) == (task, 2, link))
    rows = (row for s in of_link for row in sooner.sooner(s) if row.method == METHOD)
    means = (map(times, (sooner.mean(row.dense), sooner.mean(row.cast))) for row in rows)
    return next((f"{dense} ({cast})" for dense, cast in means), "")


def over_baselines(setup: Setup) -> tuple[float, float]:
    """Returns AdaComp's speed-ups over the best dense step and the best 16-bit cast."""
    cast = min(setup.seconds(name) for name in CASTS if name in setup.records)
    return setup.dense / setup.seconds(METHOD), cast / setup.seconds(METHOD)


def steps(found: Sequence[Setup]) -> Iterator[str]:
    """Yields a line on the MLP's steps for each link."""
    for link in LINKS:
        for setup in found:
            if (setup.job, setup.workers, setup.link) == (jobs.MLP, 2, link):
                dense, cast = map(times, over_baselines(setup))
                yield (
                    f"At {link}, a step of a model with 2.4 million weights is {dense} times "
                    f"faster with AdaComp than the best dense step, and {cast} times than with "
                    "16 bits."
                )


def trainings(trained: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line on the time to an accuracy for each link."""
    for link in LINKS:
        parts = (f"{name} {_training(trained, task, link)}" for task, name in TASKS.items())
        yield f"At {link}: {'; '.join(parts)}."
