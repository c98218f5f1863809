"""Tables of the network benchmark's results, in Markdown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jobs
import network_forecasts
import network_goals
from network_rows import ENOUGH_BYTES, TOLERANCE, Record, Row, grouped, milliseconds, rows

Tables: TypeAlias = dict[tuple, list[Record]]

TITLES = {
    jobs.EXCHANGE: "Exchange of a ResNet-50's gradient",
    jobs.MLP: "MLP of 2.4 million weights, whole step",
    jobs.LSTM: "LSTM of 0.36 million weights, whole step",
    jobs.RESNET: "ResNet-20 of 0.27 million weights, whole step",
}


def split(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of each contender's parts of a step.

    Computing is the time of a step without communication. Encoding and decoding were measured
    separately. Communicating is the rest of a step. The parts of Horovod's and PyTorch's steps are
    not measured.
    """
    compute = next((milliseconds(r) for r in records if r["contender"] == jobs.NOTHING), None)
    if compute is None:
        return {}
    parts = {}
    for record in records:
        if jobs.framework(record["contender"]) != jobs.TENSORFLOW_NAME:
            continue
        stages = record["stages"] or {"encode": 0.0, "decode": 0.0}
        encode, decode = (1e3 * stages[name] for name in ("encode", "decode"))
        rest = max(0.0, milliseconds(record) - compute - encode - decode)
        parts[record["contender"]] = {
            "compute": compute,
            "encode": encode,
            "communicate": rest,
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


def break_even(curve: Sequence[tuple[float, float]]) -> float | None:
    """Returns the Mbit/s above which a contender is not faster than dense; None if unknown.

    The speed is interpolated between two links, with both axes logarithmic.
    """
    for (slow, gain), (fast, loss) in itertools.pairwise(curve):
        if gain >= 1 > loss:
            share = math.log(gain) / (math.log(gain) - math.log(loss))
            return slow * (fast / slow) ** share
    return None


def markdown(measured: dict[str, Any]) -> str:
    """Yields the lines of all tables."""
    about = ", ".join(f"{name}: {value}" for name, value in measured["about"].items())
    tables = grouped(measured["records"], "job", "workers", "link")
    parts = [
        about + ".",
        "",
        *table(_LINK_COLUMNS, _links(measured)),
        *_goals(tables),
        "",
        _agreement(tables),
        *_forecasts(tables),
    ]
    for (job, workers), of_job in grouped(measured["records"], "job", "workers").items():
        parts += ["", f"## {TITLES[job]}, {workers} workers"]
        for (link,), records in grouped(of_job, "link").items():
            parts += ["", f"**{link}**", ""]
            parts += table(_COLUMNS, map(_cells, rows(records)))
        parts += _even(measured, job, workers)
    return "\n".join(parts) + "\n"


_LINK_COLUMNS = ("workers", "link", "Mbit/s", "Mbit/s each way at a time", "round trip, ms")
_GOAL_COLUMNS = ("times faster than its dense run, two workers", "wanted", "at least", "measured")
_CHOICE_COLUMNS = ("`auto`", "best candidate", "`auto` over it", "its quartiles apart, over it")
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


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Yields the lines of a table."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return [*lines, *("| " + " | ".join(cells) + " |" for cells in body)]


def _links(measured: dict[str, Any]) -> Iterator[list[str]]:
    both = speeds(measured)
    for raw in measured["raw"]:
        place = raw["workers"], raw["link"]
        cells = (f"{speed:,.1f}" for speed in (raw["Mbit/s"], both[place]))
        yield [str(raw["workers"]), raw["link"], *cells, f"{raw['ms']:.2f}"]


def _goals(tables: Tables) -> list[str]:
    body = list(network_goals.reached({place: rows(of_one) for place, of_one in tables.items()}))
    return ["", *table(_GOAL_COLUMNS, body)] if body else []


def _forecasts(tables: Tables) -> list[str]:
    sentence = network_forecasts.accuracy(tables)
    body = list(network_forecasts.choices(tables))
    return [
        *([sentence] if sentence else []),
        *(["", *table(_CHOICE_COLUMNS, body)] if body else []),
    ]


def _agreement(tables: Tables) -> str:
    of_all = [row for records in tables.values() for row in rows(records)]
    checked = [row.agrees for row in of_all if row.agrees is not None]
    return (
        f"Of {len(checked)} counts of more than {ENOUGH_BYTES:,} bytes a step, {sum(checked)} are "
        f"within {TOLERANCE:.0%} of what the interface counted."
    )


def _even(measured: dict[str, Any], job: str, workers: int) -> list[str]:
    curves = speed_ups(measured, job, workers)
    if all(len(curve) < 2 for curve in curves.values()):
        return []
    body = []
    for name, curve in curves.items():
        if name in (*jobs.DENSE.values(), jobs.NOTHING):
            continue
        even = break_even(curve)
        where = f"{even:,.0f}" if even else "above all" if curve[-1][1] >= 1 else "below all"
        body.append([name, where])
    return ["", *table(("contender", "break-even, Mbit/s"), body)]
