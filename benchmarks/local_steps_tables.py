"""The tables of local_steps_accuracy.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from trainings import Task

DENSE = "dense"  # name of the training that the others are compared with
WITHIN = 0.01

Record: TypeAlias = dict[str, Any]


def fewer_bytes(record: Record) -> tuple[float, float]:
    """Returns how many times fewer bytes a step of dense training's batch gives, and sends."""
    if record["steps"] == 1:  # dense
        return record["batch"], record["batch"]
    dense, workers = record["dense_bytes"], record["learners"]
    ring = 2 * (workers - 1) / workers * dense
    return dense / record["payload_bytes"], ring / record["sent_bytes"]


def compare(records: Sequence[Record], readings: Mapping[str, Task]) -> list[Record]:
    """A row for each training: means over the seeds that dense training has, too.

    Args:
        records: Those of all runs.
        readings: How to read the quality, by task.
    """
    dense = {(r["task"], r["seed"]): r["quality"] for r in records if r["training"] == DENSE}
    kinds: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        if (record["task"], record["seed"]) in dense:
            kind = (record["task"], record["learners"], record["training"])
            kinds.setdefault(kind, []).append(record)
    rows = []
    for (task, learners, training), same in kinds.items():
        goals = [dense[task, record["seed"]] for record in same]
        quality, goal = statistics.mean(r["quality"] for r in same), statistics.mean(goals)
        gained = [r["quality"] - one for r, one in zip(same, goals, strict=True)]
        rises = readings[task].rises
        good = quality >= (1 - WITHIN) * goal if rises else quality <= (1 + WITHIN) * goal
        given, sent = (statistics.mean(one) for one in zip(*map(fewer_bytes, same), strict=True))
        first = same[0]
        rows.append(
            {
                "task": task,
                "learners": learners,
                "training": training,
                **{key: first[key] for key in ("steps", "compressor", "outer")},
                "seeds": len(same),
                "quality": quality,
                "deviation": statistics.stdev(r["quality"] for r in same) if same[1:] else 0.0,
                "difference": statistics.mean(gained),
                "good": good,
                "bytes": first["dense_bytes"] / given,
                "times fewer": given,
                "times fewer sent": sent,
            }
        )
    return rows


def markdown(rows: Sequence[Record], readings: Mapping[str, Task]) -> str:
    """The tables: all trainings of each task, and the longest rounds that are good enough."""
    parts = [
        f"**{task}**\n\n{_table([row for row in rows if row['task'] == task], readings[task])}"
        for task in dict.fromkeys(row["task"] for row in rows)
    ]
    return "\n".join([*parts, f"**The longest round within 1 % of dense**\n\n{_longest(rows)}"])


def _table(rows: Sequence[Record], reading: Task) -> str:
    lines = [
        f"| learners | training | seeds | {reading.label} | from dense | within 1 % "
        "| bytes a step | times fewer | times fewer sent |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f" ± {row['deviation']:.{reading.digits}f}" if row["seeds"] > 1 else ""
        cells = [
            str(row["learners"]) if row["steps"] > 1 else "any",
            row["training"],
            str(row["seeds"]),
            f"{row['quality']:.{reading.digits}f}{spread}",
            f"{row['difference']:+.{reading.digits}f}",
            "yes" if row["good"] else "no",
            f"{row['bytes']:,.0f}",
            f"{row['times fewer']:,.0f}",
            f"{row['times fewer sent']:,.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _longest(rows: Sequence[Record]) -> str:
    local = [row for row in rows if row["steps"] > 1]
    compressors = list(dict.fromkeys(row["compressor"] for row in local))
    lines = [
        "| task | learners | " + " | ".join(f"steps, {name}" for name in compressors) + " |",
        "|---|---" + "|---" * len(compressors) + "|",
    ]
    for task, learners in dict.fromkeys((row["task"], row["learners"]) for row in local):
        cells = [task, str(learners)]
        for compressor in compressors:
            key = (task, learners, compressor)
            some = [r for r in local if (r["task"], r["learners"], r["compressor"]) == key]
            good = [row["steps"] for row in some if row["good"]]
            cells.append(str(max(good)) if good else "none" if some else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
