"""Claims of papers: what a paper says, the runs that repeat it, and the check of their records."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from output import spread
from simulated import WORKLOADS, Training

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
CANNOT_RUN, NOT_RUN = "cannot be run here", "not run yet"
NATS = math.log(2)  # in a bit
POINT = 1.0  # of the 360 images of digits, an accuracy has a deviation of 0.7 points

Record: TypeAlias = dict[str, Any]
Results: TypeAlias = Mapping[str, Sequence[Record]]  # by label of the run, a record for each seed


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a claim's runs.

    Attributes:
        holds: Whether the claim is reproduced.
        found: The measured values, for a cell of a table.
        why: A sentence that gives the reason.
    """

    holds: bool
    found: str
    why: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """A headline of a paper.

    Attributes:
        name: The paper's name, and the claim's.
        says: A sentence with what the paper says, and on what.
        figure: The paper's values, for a cell of a table.
        recalled: Whether the figure is recalled, and was not read in the paper.
        ran: A sentence with what was run.
        runs: The trainings by label, with seed 0.
        check: Judges the records.
        cannot: The reason why nothing can be run here; then there are no runs.
    """

    name: str
    says: str
    figure: str
    recalled: bool
    ran: str = ""
    runs: Mapping[str, Training] = dataclasses.field(default_factory=dict)
    check: Callable[[Results], Outcome] | None = None
    cannot: str = ""

    def verdict(self, results: Results) -> tuple[str, Outcome | None]:
        """Returns the verdict, and what it is based on if there is something."""
        if self.check is None:
            return CANNOT_RUN, None
        if not all(results.get(label) for label in self.runs):
            return NOT_RUN, None
        outcome = self.check(results)
        return REPRODUCED if outcome.holds else NOT_REPRODUCED, outcome


@dataclasses.dataclass(frozen=True)
class Paper:
    """A paper and its claims."""

    name: str
    reference: str
    claims: Sequence[Claim]


def by(training: Training, learners: int, compressor: str = "adacomp") -> Training:
    """Returns dense training, done by learners with a method."""
    return dataclasses.replace(training, learners=learners, compressor=compressor)


def qualities(results: Results, label: str) -> list[float]:
    """Returns the quality at the end, for each seed."""
    return [record["quality"] for record in results[label]]


def behind(results: Results, label: str, dense: str = "dense") -> list[float]:
    """Returns how far a run is behind another one with the same seed, in the quality's unit."""
    rises = WORKLOADS[results[label][0]["task"]].reading.rises
    pairs = zip(qualities(results, dense), qualities(results, label), strict=True)
    return [a - b if rises else b - a for a, b in pairs]


def payload_ratio(record: Record) -> float:
    """Returns the payload ratio of the whole run."""
    return record["dense_bytes"] / record["payload_bytes"]


def last_ratio(record: Record) -> float:
    """Returns the payload ratio after the last evaluation but one."""
    return record["dense_bytes"] / record["period_payload_bytes"][-1]


def ratio(results: Results, label: str, read: Callable[[Record], float] = payload_ratio) -> float:
    """Returns the mean ratio over the seeds."""
    return statistics.mean(read(record) for record in results[label])


def mean_behind(results: Results, label: str, dense: str = "dense") -> float:
    """Returns the mean of `behind` over the seeds."""
    return statistics.mean(behind(results, label, dense))


def points(results: Results, label: str, digits: int = 2) -> str:
    """Returns a quality with its spread over the seeds."""
    return spread(qualities(results, label), digits)


def error(results: Results, label: str) -> str:
    """Returns the error in % with its spread over the seeds."""
    return spread([100 - value for value in qualities(results, label)], 2)


def nats(results: Results, label: str) -> str:
    """Returns nats per character with their spread over the seeds."""
    return spread([NATS * bits for bits in qualities(results, label)], 3)
