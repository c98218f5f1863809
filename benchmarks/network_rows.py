"""Rows of the network benchmark's tables: a contender on a link."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import jobs

ENOUGH_BYTES = 100_000  # of a step; below, what protocols add is no longer small beside it
TOLERANCE = 0.02

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """A contender on a link: times in milliseconds, bytes that a worker sends in a step.

    Attributes:
        speed_up: Over the dense run of its own framework.
        counted: By our own count; None where nobody counts.
        carried: What TCP carried by the interface's counters, less what the benchmark itself adds.
        page_faults: The median of its steps; None if they were not counted.
        predicted: The median, by what `gc.advise` says of the exchange and the measured step
            without communication; None where nobody predicts.
    """

    name: str
    median: float
    least: float
    most: float
    speed_up: float
    counted: float | None
    carried: float
    page_faults: float | None
    predicted: float | None = None

    @property
    def agrees(self) -> bool | None:
        """Returns whether our count agrees with the counters; None if it is missing or small."""
        if not self.counted or self.counted < ENOUGH_BYTES:
            return None
        return abs(self.carried / self.counted - 1) <= TOLERANCE


def rows(records: Sequence[Record]) -> list[Row]:
    """The rows of one table: all that was measured of one job on one link."""
    medians = {record["contender"]: milliseconds(record) for record in records}
    compute = medians.get(jobs.NOTHING)
    own = next((r["carried_bytes"] for r in records if r["contender"] == jobs.NOTHING), 0.0)

    def row(record: Record) -> Row:
        name, seconds = record["contender"], record["seconds"]
        dense = medians[jobs.DENSE[jobs.framework(name)]]
        return Row(
            name,
            medians[name],
            1e3 * min(seconds),
            1e3 * max(seconds),
            dense / medians[name],
            record["counted_bytes"],
            max(0.0, record["carried_bytes"] - own),
            statistics.median(record["page_faults"]) if record["page_faults"] else None,
            _plus(compute, record.get("predicted")),
        )

    return [row(record) for record in records]


def _plus(compute: float | None, exchange: float | None) -> float | None:
    """Milliseconds of a step that computes so many, and exchanges for so many seconds."""
    return None if compute is None or exchange is None else compute + 1e3 * exchange


def grouped(records: Iterable[Record], *keys: str) -> dict[tuple, list[Record]]:
    """The records by what they have under `keys`, in the order in which they came."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    return groups


def milliseconds(record: Record) -> float:
    """The median."""
    return 1e3 * statistics.median(record["seconds"])
