"""Tables and plots of the network benchmark's results."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import turns
from output import table
from records import Record
from turns import AUTO

ENOUGH_BYTES = 100_000  # of a step; with fewer bytes, the protocols' headers matter
TOLERANCE = 0.02
CLOSE = 0.2  # of the measured median
TITLES = {
    turns.EXCHANGE: "Exchange of a ResNet-50's gradient",
    turns.MLP: "MLP of 2.4 million weights, whole step",
    turns.LSTM: "LSTM of 0.36 million weights, whole step",
    turns.RESNET: "ResNet-20 of 0.27 million weights, whole step",
}


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
    compute = medians.get(turns.NOTHING)
    idle_bytes = next((r["carried_bytes"] for r in records if r["contender"] == turns.NOTHING), 0.0)

    def row(record: Record) -> Row:
        name, seconds = record["contender"], record["seconds"]
        dense = medians[turns.DENSE[turns.framework(name)]]
        return Row(
            name,
            medians[name],
            1e3 * min(seconds),
            1e3 * max(seconds),
            dense / medians[name],
            record["counted_bytes"],
            max(0.0, record["carried_bytes"] - idle_bytes),
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


def split(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of each contender's parts of a step.

    Computing is the time of a step without communication. Encoding and decoding were measured
    separately. Communicating is the rest of a step. The parts of Horovod's and PyTorch's steps are
    not measured.
    """
    compute = next((milliseconds(r) for r in records if r["contender"] == turns.NOTHING), None)
    if compute is None:
        return {}
    parts = {}
    for record in records:
        if turns.framework(record["contender"]) != turns.TENSORFLOW_NAME:
            continue
        stages = record["stages"] or {"encode": 0.0, "decode": 0.0}
        encode, decode = (1e3 * stages[name] for name in ("encode", "decode"))
        communication = max(0.0, milliseconds(record) - compute - encode - decode)
        parts[record["contender"]] = {
            "compute": compute,
            "encode": encode,
            "communicate": communication,
            "decode": decode,
        }
    return parts


def speeds(measured: Mapping[str, Any]) -> dict[tuple[int, str], float]:
    """Returns the measured speeds of links, in Mbit/s, by number of workers and link.

    Workers send in both directions at the same time, so the measured speed for both directions
    counts.
    """
    return {
        (raw["workers"], raw["link"]): raw.get("Mbit/s both ways", raw["Mbit/s"])
        for raw in measured["raw"]
    }


def speed_ups(measured: dict[str, Any], job: str, workers: int) -> dict[str, list[tuple]]:
    """Returns pairs of Mbit/s and speed-up by contender, the slowest link first."""
    raw = speeds(measured)
    curves: dict[str, list[tuple]] = {}
    for (of, count, link), records in grouped(
        measured["records"], "job", "workers", "link"
    ).items():
        if (of, count) == (job, workers):
            for row in rows(records):
                curves.setdefault(row.name, []).append((raw[workers, link], row.speed_up))
    return {name: sorted(curve) for name, curve in curves.items()}


def markdown(measured: dict[str, Any]) -> str:
    """Yields the lines of all tables."""
    about = ", ".join(f"{name}: {value}" for name, value in measured["about"].items())
    tables = grouped(measured["records"], "job", "workers", "link")
    parts = [
        about + ".",
        "",
        *table(_LINK_COLUMNS, _links(measured)),
        "",
        agreement(tables),
        accuracy(tables),
    ]
    for (job, workers), job_records in grouped(measured["records"], "job", "workers").items():
        parts += ["", f"## {TITLES[job]}, {workers} workers"]
        for (link,), records in grouped(job_records, "link").items():
            parts += ["", f"**{link}**", ""]
            parts += table(_COLUMNS, map(_cells, rows(records)))
    return "\n".join(parts) + "\n"


_LINK_COLUMNS = ("workers", "link", "Mbit/s", "Mbit/s each way at a time", "round trip, ms")
_COLUMNS = (
    "contender",
    "median ms",
    "min",
    "max",
    "predicted",
    "times faster",
    "bytes sent",
    "interface",
    "page faults",
)


def _cells(row: Row) -> list[str]:
    times = [f"{value:.1f}" for value in (row.median, row.least, row.most)]
    counted = "" if row.counted is None else f"{row.counted:,.0f}"
    predicted = "" if row.predicted is None else f"{row.predicted:.1f}"
    faults = "" if row.page_faults is None else f"{row.page_faults:,.0f}"
    return [row.name, *times, predicted, f"{row.speed_up:.2f}", counted, _interface(row), faults]


def _interface(row: Row) -> str:
    if row.counted is None:
        return f"{row.carried:,.0f}"
    if row.agrees is None:
        return f"{row.carried - row.counted:+,.0f} B"
    mark = "" if row.agrees else " (!)"
    return f"{row.carried / row.counted - 1:+.1%}{mark}"


def _links(measured: dict[str, Any]) -> Iterator[list[str]]:
    speeds_by_link = speeds(measured)
    for raw in measured["raw"]:
        link_key = raw["workers"], raw["link"]
        cells = (f"{speed:,.1f}" for speed in (raw["Mbit/s"], speeds_by_link[link_key]))
        yield [str(raw["workers"]), raw["link"], *cells, f"{raw['ms']:.2f}"]


def accuracy(tables: Mapping[tuple[Any, ...], Sequence[Record]]) -> str:
    """Returns a sentence on the number of close predictions; empty without predictions."""
    predicted = [
        abs(row.predicted / row.median - 1)
        for records in tables.values()
        for row in rows(records)
        if row.predicted is not None
    ]
    close = sum(error <= CLOSE for error in predicted)
    return (
        f"Of {len(predicted)} predictions {close} are within {CLOSE:.0%} of the measured median; "
        f"the median error is {statistics.median(predicted):.0%}."
        if predicted
        else ""
    )


def agreement(tables: Mapping[tuple, Sequence[Record]]) -> str:
    """A sentence on the number of byte counts that agree with the interface."""
    all_rows = [row for records in tables.values() for row in rows(records)]
    checked = [row.agrees for row in all_rows if row.agrees is not None]
    return (
        f"Of {len(checked)} counts of more than {ENOUGH_BYTES:,} bytes a step, {sum(checked)} are "
        f"within {TOLERANCE:.0%} of what the interface counted."
    )


def drawable(
    measured: Record, job: str, workers: int
) -> tuple[str, dict[str, dict[str, dict[str, float]]], dict[str, list[tuple]]]:
    """Returns the title, the parts of steps by link, and the speed-ups of a job's pictures."""
    found = [r for r in measured["records"] if (r["job"], r["workers"]) == (job, workers)]
    parts = {
        link: {name: part for name, part in split(records).items() if name != AUTO}
        for (link,), records in grouped(found, "link").items()
    }
    if not any(record["stages"] for record in found):  # encoding was not measured by itself
        parts = {
            link: {
                name: {"compute": part["compute"], "exchange": part["communicate"]}
                for name, part in of_link.items()
            }
            for link, of_link in parts.items()
        }
    curves = speed_ups(measured, job, workers)
    if job == turns.EXCHANGE:
        curves.pop(turns.NOTHING, None)  # takes no time at all
    return f"{TITLES[job]}, {workers} workers", parts, curves


def draw(measured: Record, folder: Path) -> list[Path]:
    """Draws the pictures for which there is data; returns the files."""
    import pictures

    files = []
    for job, workers in grouped(measured["records"], "job", "workers"):
        name = f"{job}-{workers}workers"
        title, parts, curves = drawable(measured, job, workers)
        if all(parts.values()):
            files.append(folder / f"network-split-{name}.png")
            pictures.split(title, parts, files[-1])
        if max(map(len, curves.values())) > 1:
            files.append(folder / f"network-speed-{name}.png")
            pictures.speed(title, curves, files[-1])
    return files
