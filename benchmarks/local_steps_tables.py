"""The tables of local_steps_accuracy.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from output import spread
from trainings import Task

DENSE = "dense"  # name of the training that the others are compared with
WITHIN = 0.01

Record: TypeAlias = dict[str, Any]
_KIND = ("task", "dense_steps", "learners", "training")
_SETTINGS = ("steps", "outer", "compressor", "warmup_steps", "batch", "rate")


def read(folder: Path) -> list[Record]:
    """Returns the records in a folder."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def fewer_bytes(record: Record) -> tuple[float, float]:
    """Returns how many times fewer bytes a step of dense training's batch gives, and sends."""
    if record["steps"] == 1:  # dense
        return record["batch"], record["batch"]
    dense, workers = record["dense_bytes"], record["learners"]
    ring = 2 * (workers - 1) / workers * dense
    return dense / record["payload_bytes"], ring / record["sent_bytes"]


def compare(records: Sequence[Record], readings: Mapping[str, Task]) -> list[Record]:
    """A row for each training: means over the seeds that dense training has, too.

    Each seed is compared with dense training at its best learning rate: the rate with the best mean
    over all seeds that dense training has at any rate.

    Args:
        records: Those of all runs.
        readings: How to read the quality, by task; rows have the tasks in this order.
    """
    dense = _best_dense(records, readings)
    kinds: dict[tuple, list[Record]] = {}
    for record in sorted(records, key=lambda one: _place(one, list(readings))):
        if _of_seed(record) in dense:
            kinds.setdefault(tuple(record[key] for key in _KIND), []).append(record)
    rows = []
    for same in kinds.values():
        goals = [dense[_of_seed(record)] for record in same]
        qualities = [record["quality"] for record in same]
        quality, goal = statistics.mean(qualities), statistics.mean(goals)
        rises = readings[same[0]["task"]].rises
        good = quality >= (1 - WITHIN) * goal if rises else quality <= (1 + WITHIN) * goal
        given, sent = (statistics.mean(one) for one in zip(*map(fewer_bytes, same), strict=True))
        rows.append(
            {
                **{key: same[0][key] for key in (*_KIND, *_SETTINGS)},
                "seeds": len(same),
                "qualities": qualities,
                "quality": quality,
                "difference": quality - goal,
                "good": good,
                "bytes": same[0]["dense_bytes"] / given,
                "times fewer": given,
                "times fewer sent": sent,
            }
        )
    return rows


def _best_dense(records: Sequence[Record], readings: Mapping[str, Task]) -> dict[tuple, float]:
    """Returns the quality of dense training at its best rate, by task, steps and seed."""
    rates: dict[tuple, dict[float, dict[tuple, float]]] = {}
    for record in records:
        if record["steps"] == 1 and record["batch"] == 1:
            of_task = rates.setdefault((record["task"], record["dense_steps"]), {})
            of_task.setdefault(record["rate"], {})[_of_seed(record)] = record["quality"]
    best: dict[tuple, float] = {}
    for (task, _), of_task in rates.items():
        seeds = max(map(len, of_task.values()))
        whole = [of_rate for of_rate in of_task.values() if len(of_rate) == seeds]
        sign = 1 if readings[task].rises else -1
        best |= max(whole, key=lambda of_rate: sign * statistics.mean(of_rate.values()))
    return best


def _of_seed(record: Record) -> tuple:
    return record["task"], record["dense_steps"], record["seed"]


def _place(record: Record, tasks: Sequence[str]) -> tuple:
    """Returns a key that sorts records: dense training first, and rounds by their lengths."""
    first = tasks.index(record["task"]), record["dense_steps"], record["learners"]
    return *first, *(record[key] for key in _SETTINGS), record["seed"]


def markdown(rows: Sequence[Record], readings: Mapping[str, Task]) -> str:
    """The tables: the longest rounds that are good enough, and all trainings of each task."""
    parts = [f"**The longest rounds within 1 % of dense training**\n\n{_longest(rows)}"]
    for task, steps in dict.fromkeys((row["task"], row["dense_steps"]) for row in rows):
        own = [row for row in rows if (row["task"], row["dense_steps"]) == (task, steps)]
        parts.append(f"**{task}, {steps:,} steps**\n\n{_table(own, readings[task])}")
    return "\n".join(parts)


def _named(row: Record) -> str:
    """Returns a training in words."""
    parts = [DENSE]
    if row["steps"] > 1:
        outer = "mean" if row["outer"] == "average" else "Nesterov"
        compressor = "uncompressed" if row["compressor"] == "none" else row["compressor"]
        parts = [f"rounds of {row['steps']}", outer, compressor]
    parts += [f"{row['warmup_steps']} steps of warm-up"] if row["warmup_steps"] else []
    parts += [f"batches {row['batch']} times larger"] if row["batch"] > 1 else []
    parts += [f"rate {row['rate']:.3g} times"] if row["rate"] != 1 else []
    return ", ".join(parts)


def _lines(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _table(rows: Sequence[Record], reading: Task) -> str:
    head = [
        *("learners", "training", "seeds", reading.label, "from best dense", "within 1 %"),
        *("bytes a step", "times fewer", "times fewer sent"),
    ]
    body = [
        [
            str(row["learners"]) if row["steps"] > 1 else "any",
            _named(row),
            str(row["seeds"]),
            spread(row["qualities"], reading.digits),
            f"{row['difference']:+.{reading.digits}f}",
            "yes" if row["good"] else "no",
            *(f"{row[key]:,.0f}" for key in ("bytes", "times fewer", "times fewer sent")),
        ]
        for row in rows
    ]
    return _lines(head, body)


def _longest(rows: Sequence[Record]) -> str:
    local = [row for row in rows if row["steps"] > 1]
    compressors = list(dict.fromkeys(row["compressor"] for row in local))
    body = []
    for place in dict.fromkeys(_place_of(row) for row in local):
        own = [row for row in local if _place_of(row) == place]
        task, steps, learners = place
        larger = [row for row in rows if row["batch"] > 1 and _place_of(row) == (task, steps, 1)]
        body.append(
            [
                f"{task}, {steps:,} steps",
                str(learners),
                *(_most([r for r in own if r["compressor"] == c], "steps") for c in compressors),
                _most(larger, "batch"),
            ]
        )
    columns = [f"steps, {'uncompressed' if name == 'none' else name}" for name in compressors]
    return _lines(["task", "learners", *columns, "larger batch"], body)


def _place_of(row: Record) -> tuple[str, int, int]:
    return row["task"], row["dense_steps"], row["learners"]


def _most(rows: Sequence[Record], key: str) -> str:
    """Returns the largest value of rows that are good enough, of all rows."""
    good = [row[key] for row in rows if row["good"]]
    return str(max(good)) if good else "none" if rows else ""
