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
UNDECIDED, CANNOT_RUN, NOT_RUN = "undecided", "cannot be run here", "not run yet"
NATS = math.log(2)  # in a bit
DENSE = "dense"
POINT = 1.0  # of the 360 images of digits, an accuracy has a deviation of 0.7 points
FAIR = 1.3  # times the ratio of what a method is compared with
IMAGE = 100 / 360  # points that one of these images is worth
TRAINED = {"digits": 95.0, "mnist": 95.0, "shakespeare-2layers": 2.7}  # a dense run must reach it

Record: TypeAlias = dict[str, Any]
Results: TypeAlias = Mapping[str, Sequence[Record]]  # by label of the run, a record for each seed


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a claim's runs.

    Attributes:
        holds: Whether the claim is reproduced; None if the runs cannot tell.
        found: The measured values, with what each is.
        why: A sentence that gives the reason.
    """

    holds: bool | None
    found: Mapping[str, str]
    why: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """A headline of a paper.

    Attributes:
        name: The paper's name, and the claim's.
        says: A sentence with what the paper says, and on what.
        checked: Whether what it says was read in the paper, its abstract or its authors' code.
        ran: A sentence with what was run.
        runs: The trainings by label, with seed 0.
        check: Judges the records.
        cannot: The reason why nothing can be run here; then there are no runs.
    """

    name: str
    says: str
    checked: bool
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
        untrained = _untrained(results)
        if untrained:
            outcome = dataclasses.replace(outcome, holds=None, why=untrained)
        verdicts = {True: REPRODUCED, False: NOT_REPRODUCED, None: UNDECIDED}
        return verdicts[outcome.holds], outcome


@dataclasses.dataclass(frozen=True)
class Paper:
    """A paper and its claims."""

    name: str
    reference: str
    claims: Sequence[Claim]


def compressed(training: Training, workers: int, compressor: str = "adacomp") -> Training:
    """Returns uncompressed training, done by several workers with a method."""
    return dataclasses.replace(training, learners=workers, compressor=compressor)


def _untrained(results: Results) -> str:
    """Returns why nothing follows from the runs, if the dense run has not trained."""
    if "dense" not in results:
        return ""
    task, reached = results["dense"][0]["task"], statistics.mean(qualities(results, "dense"))
    reading, limit = WORKLOADS[task].reading, TRAINED[task]
    if reached >= limit if reading.rises else reached <= limit:
        return ""
    unit = reading.label.rpartition(", ")[2]
    return (
        f"Uncompressed training itself reached {reached:.1f} {unit}, and {limit:g} was asked for. "
        f"The run "
        "is too short, or its learning rate too large, to judge compression by."
    )


def within(gap: float, allowed: float = POINT) -> bool | None:
    """Returns whether a gap on digits is allowed; None if less than an image is between them."""
    return None if abs(gap - allowed) < IMAGE else gap < allowed


def all_hold(*conditions: bool | None) -> bool | None:
    """Returns False if a condition fails, and else None if one is not known."""
    if False in conditions:
        return False
    return None if None in conditions else True


def behind_or_ahead(gap: float, digits: int = 1, unit: str = "points") -> str:
    """Returns a gap in words, to be followed by what it is compared with."""
    return f"{abs(gap):.{digits}f} {unit} {'behind' if gap >= 0 else 'ahead of'}"


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


def later_ratio(record: Record) -> float:
    """Returns the payload ratio in the second half of the run."""
    sent = record["period_payload_bytes"]
    return record["dense_bytes"] / statistics.mean(sent[len(sent) // 2 :])


def later_bytes(results: Results, label: str) -> float:
    """Returns the bytes of a step in the second half of the run: the mean over the seeds."""
    return ratio(results, label, lambda record: record["dense_bytes"] / later_ratio(record))


def ratio(results: Results, label: str, read: Callable[[Record], float] = payload_ratio) -> float:
    """Returns the mean ratio over the seeds."""
    return statistics.mean(read(record) for record in results[label])


def mean_behind(results: Results, label: str, dense: str = "dense") -> float:
    """Returns the mean of `behind` over the seeds."""
    return statistics.mean(behind(results, label, dense))


def points(results: Results, label: str, digits: int = 2) -> str:
    """A quality with its spread over the seeds."""
    return spread(qualities(results, label), digits)


def accuracies(results: Results, *labels: str, digits: int = 1) -> dict[str, str]:
    """The accuracies of runs, by label."""
    names = {DENSE: "uncompressed"}
    return {names.get(label, label): f"{points(results, label, digits)} %" for label in labels}


def error(results: Results, label: str) -> str:
    """Returns the error in % with its spread over the seeds."""
    return spread([100 - value for value in qualities(results, label)], 2)


def nats(results: Results, label: str) -> str:
    """Returns nats per character with their spread over the seeds."""
    return spread([NATS * bits for bits in qualities(results, label)], 3)
