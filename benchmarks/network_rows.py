"""Rows of the network benchmark's tables: a contender on a link."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import jobs

ENOUGH_BYTES = 100_000  # of a step; with fewer bytes, the protocols' headers matter
TOLERANCE = 0.02

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """A contender on a link: times in milliseconds, bytes that a worker sends in a step.

    Attributes:
        speed_up: The speed-up over the dense run of the same framework.
        counted: The bytes by our own count; None if not counted.
        carried: TCP's bytes by the interface's counters, without the bytes of the benchmark itself.
        page_faults: The median over the steps; None if not counted.
        predicted: The predicted median, from `gc.advise`'s time of the exchange and the measured
            step without communication; None without a prediction.
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
    """Returns the rows of a table, with all measurements of a job on a link."""
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
    """Returns the milliseconds of a step, from the times of computing and exchange."""
    return None if compute is None or exchange is None else compute + 1e3 * exchange


def grouped(records: Iterable[Record], *keys: str) -> dict[tuple, list[Record]]:
    """Groups records by their values under `keys`, in the order of first appearance."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    return groups


def milliseconds(record: Record) -> float:
    """The median."""
    return 1e3 * statistics.median(record["seconds"])
