"""The goals of the package on links of known speed, and the measured figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jobs
from links import UNSHAPED
from network_rows import Row

WORKERS = 2
BASELINES = (jobs.ALL_REDUCE, jobs.FLOAT16, "no_compression", jobs.NOTHING)
HOOKS = (jobs.TORCH_FLOAT16, jobs.TORCH_POWER_SGD)


@dataclasses.dataclass(frozen=True)
class Goal:
    """The speed-up over its dense run that a contender should reach.

    Attributes:
        job: The measured job.
        link: The link between the workers of the job.
        wanted: The speed-up that we aim for.
        least: The speed-up that is required.
        contender: The contender; None for the fastest of our methods.
    """

    job: str
    link: str
    wanted: float
    least: float
    contender: str | None = None


GOALS = (
    Goal(jobs.EXCHANGE, UNSHAPED, 15, 10, "adacomp"),
    Goal(jobs.EXCHANGE, "1 Gbit/s", 20, 40 / 3, "adacomp"),
    Goal(jobs.EXCHANGE, "100 Mbit/s", 30, 20, "adacomp"),
    Goal(jobs.EXCHANGE, "100 Mbit/s", 60, 40, "scalecom"),
    Goal(jobs.EXCHANGE, UNSHAPED, 4, 4, jobs.HOROVOD_ADACOMP),
    Goal(jobs.EXCHANGE, "100 Mbit/s", 30, 30, jobs.HOROVOD_ADACOMP),
    Goal(jobs.MLP, "100 Mbit/s", 15, 15),
    Goal(jobs.MLP, "1 Gbit/s", 4, 4),
    Goal(jobs.MLP, UNSHAPED, 1, 1),
)


def fastest(rows: Sequence[Row]) -> Row | None:
    """Returns the fastest row of our methods over TensorFlow's collectives, if any."""
    of_tensorflow = (row for row in rows if jobs.framework(row.name) == jobs.TENSORFLOW_NAME)
    ours = [row for row in of_tensorflow if row.name not in BASELINES]
    return max(ours, key=lambda row: row.speed_up, default=None)


def reached(tables: dict[tuple[Any, ...], Sequence[Row]]) -> Iterator[list[str]]:
    """Yields the cells of a table, for each measured goal by `(job, workers, link)`."""
    for goal in GOALS:
        rows = tables.get((goal.job, WORKERS, goal.link), ())
        row = next((row for row in rows if row.name == goal.contender), None)
        row = row if goal.contender else fastest(rows)
        if row:
            what = f"{goal.job}, {goal.link}: {row.name}"
            yield [what, f"{goal.wanted:g}", f"{goal.least:.3g}", f"{row.speed_up:.1f}"]
        hooks = [row.speed_up for row in rows if row.name in HOOKS]
        if row and hooks and goal.job == jobs.MLP:
            best = f"{max(hooks):.1f}"
            yield [f"{what}, ahead of PyTorch's best hook", best, best, f"{row.speed_up:.1f}"]
