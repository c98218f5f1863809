"""What the network benchmark measured, as tables in Markdown."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import jobs

ENOUGH_BYTES = 100_000  # of a step; below, what protocols add is no longer small beside it
TOLERANCE = 0.02

Record = dict[str, Any]
TITLES = {
    jobs.EXCHANGE: "Exchange of a ResNet-50's gradient",
    jobs.MLP: "MLP of 2.4 million weights, whole step",
    jobs.LSTM: "LSTM of 0.36 million weights, whole step",
    jobs.RESNET: "ResNet-20 of 0.27 million weights, whole step",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A contender on a link: times in milliseconds, bytes that a worker sends in a step.

    Attributes:
        speed_up: Over the dense run of its own framework.
        counted: By our own count; None where nobody counts.
        carried: What TCP carried by the interface's counters, less what the benchmark itself adds.
    """

    name: str
    median: float
    least: float
    most: float
    speed_up: float
    counted: float | None
    carried: float

    @property
    def agrees(self) -> bool | None:
        """Whether counts and counters do; None where they need not."""
        if not self.counted or self.counted < ENOUGH_BYTES:
            return None
        return abs(self.carried / self.counted - 1) <= TOLERANCE


def rows(records: Sequence[Record]) -> list[Row]:
    """The rows of one table: all that was measured of one job on one link."""
    medians = {record["contender"]: _milliseconds(record) for record in records}
    own = next((r["carried_bytes"] for r in records if r["contender"] == jobs.NOTHING), 0.0)

    def row(record: Record) -> Row:
        name, seconds = record["contender"], record["seconds"]
        dense = medians.get(jobs.TORCH_ALL_REDUCE if name in jobs.TORCH else jobs.ALL_REDUCE)
        return Row(
            name,
            medians[name],
            1e3 * min(seconds),
            1e3 * max(seconds),
            dense / medians[name] if dense else math.nan,
            record["counted_bytes"],
            max(0.0, record["carried_bytes"] - own),
        )

    return [row(record) for record in records]


def split(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Milliseconds of a step by contender: compute, encode, communicate, decode.

    Computing is what a step takes that communicates nothing; encoding and decoding were measured by
    themselves; communicating is the rest. PyTorch's are left out: their parts are not measured.
    """
    compute = next((_milliseconds(r) for r in records if r["contender"] == jobs.NOTHING), None)
    if compute is None:
        return {}
    parts = {}
    for record in records:
        if record["contender"] in jobs.TORCH:
            continue
        stages = record["stages"] or {"encode": 0.0, "decode": 0.0}
        encode, decode = (1e3 * stages[name] for name in ("encode", "decode"))
        rest = max(0.0, _milliseconds(record) - compute - encode - decode)
        parts[record["contender"]] = {
            "compute": compute,
            "encode": encode,
            "communicate": rest,
            "decode": decode,
        }
    return parts


def grouped(records: Iterable[Record], *keys: str) -> dict[tuple, list[Record]]:
    """The records by what they have under `keys`, in the order in which they came."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    return groups


def speeds(measured: dict[str, Any]) -> dict[tuple[int, str], float]:
    """What links carry, in Mbit/s, by the number of workers and the link."""
    return {(raw["workers"], raw["link"]): raw["Mbit/s"] for raw in measured["raw"]}


def speed_ups(measured: dict[str, Any], job: str, workers: int) -> dict[str, list[tuple]]:
    """Pairs of Mbit/s and speed-up by contender, the slowest link first."""
    raw = speeds(measured)
    curves: dict[str, list[tuple]] = {}
    for (of, count, link), records in grouped(
        measured["records"], "job", "workers", "link"
    ).items():
        if (of, count) == (job, workers):
            for row in rows(records):
                curves.setdefault(row.name, []).append((raw[workers, link], row.speed_up))
    return {name: sorted(curve) for name, curve in curves.items()}


def break_even(curve: Sequence[tuple[float, float]]) -> float | None:
    """At how many Mbit/s a contender is no longer faster than dense; None if nowhere measured.

    Between two links it is interpolated, with both axes logarithmic.
    """
    for (slow, gain), (fast, loss) in itertools.pairwise(curve):
        if gain >= 1 > loss:
            share = math.log(gain) / (math.log(gain) - math.log(loss))
            return slow * (fast / slow) ** share
    return None


def markdown(measured: dict[str, Any]) -> str:
    """All tables."""
    about = ", ".join(f"{name}: {value}" for name, value in measured["about"].items())
    parts = [
        about + ".",
        *_table(("workers", "link", "Mbit/s", "round trip, ms"), _links(measured)),
    ]
    for (job, workers), of_job in grouped(measured["records"], "job", "workers").items():
        parts += ["", f"### {TITLES[job]}, {workers} workers"]
        for (link,), records in grouped(of_job, "link").items():
            parts += ["", f"**{link}**", ""]
            parts += _table(_COLUMNS, map(_cells, rows(records)))
        parts += _even(measured, job, workers)
    return "\n".join(parts) + "\n"


_COLUMNS = (
    "contender",
    "median ms",
    "min",
    "max",
    "times faster",
    "bytes sent",
    "interface",
)


def _cells(row: Row) -> list[str]:
    times = [f"{value:.1f}" for value in (row.median, row.least, row.most)]
    faster = "" if math.isnan(row.speed_up) else f"{row.speed_up:.2f}"
    counted = "" if row.counted is None else f"{row.counted:,.0f}"
    return [row.name, *times, faster, counted, _interface(row)]


def _interface(row: Row) -> str:
    if row.counted is None:
        return f"{row.carried:,.0f}"
    if row.agrees is None:
        return f"{row.carried - row.counted:+,.0f} B"
    mark = "" if row.agrees else " (!)"
    return f"{row.carried / row.counted - 1:+.1%}{mark}"


def _table(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return [*lines, *("| " + " | ".join(cells) + " |" for cells in body)]


def _links(measured: dict[str, Any]) -> list[list[str]]:
    return [
        [str(raw["workers"]), raw["link"], f"{raw['Mbit/s']:,.1f}", f"{raw['ms']:.2f}"]
        for raw in measured["raw"]
    ]


def _even(measured: dict[str, Any], job: str, workers: int) -> list[str]:
    curves = speed_ups(measured, job, workers)
    if all(len(curve) < 2 for curve in curves.values()):
        return []
    body = []
    for name, curve in curves.items():
        if name in (*jobs.DENSE, jobs.NOTHING):
            continue
        even = break_even(curve)
        where = f"{even:,.0f}" if even else "above all" if curve[-1][1] >= 1 else "below all"
        body.append([name, where])
    return ["", *_table(("contender", "break-even, Mbit/s"), body)]


def _milliseconds(record: Record) -> float:
    return 1e3 * statistics.median(record["seconds"])
