"""Recorded results, from which pages are made: files with a JSON object in each line.

`evidence.jsonl`, `local_steps.jsonl` and `faults.jsonl` have a record for each run, under its name.
`curves.jsonl` has the runs of `convergence.py digits` with two workers that `pictures.py` draws. In
`network.jsonl`, a record's `kind` tells what was measured: a link, a step of training, or the time
to an accuracy. One record of that file describes the machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

FOLDER = Path(__file__).with_name("records")
EVIDENCE = FOLDER / "evidence.jsonl"
CURVES = FOLDER / "curves.jsonl"
LOCAL_STEPS = FOLDER / "local_steps.jsonl"
NETWORK = FOLDER / "network.jsonl"
FAULTS = FOLDER / "faults.jsonl"
SETUP = ("task", "optimizer", "workers", "delay", "link")  # of a time to accuracy
PACES = "times of steps"  # where they were measured, if in an earlier run
_KINDS = {"raw": "link", "records": "step", "setups": "time to accuracy"}
_QUANTILES = (0, 0.25, 0.5, 0.75, 1)
_KEPT = ("job", "workers", "link", "contender", "counted_bytes", "carried_bytes", "predicted")
_DIGITS = 5  # more than a measured time has

Record: TypeAlias = dict[str, Any]


def read(file: Path) -> list[Record]:
    """Returns the records of a file; none if there is no file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, records: Iterable[Record]) -> None:
    """Replaces the records of a file at once: an interrupted write leaves the earlier ones."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    part.replace(file)


def by_name(file: Path) -> dict[str, Record]:
    """Returns the records of runs by the name of the run, without the names."""
    return {record.pop("name"): record for record in read(file)}


def write_by_name(file: Path, records: Mapping[str, Record]) -> None:
    """Replaces the records of runs, in the order of their names."""
    write(file, ({"name": name, **records[name]} for name in sorted(records)))


def append(file: Path, name: str, record: Record) -> None:
    """Adds the record of a run."""
    with open(file, "a") as lines:
        lines.write(f"{json.dumps({'name': name, **record})}\n")


def read_network(file: Path = NETWORK) -> Record:
    """Returns the measured links (`raw`), steps (`records`) and times to an accuracy (`setups`)."""
    found: Record = {"about": {}, **{part: [] for part in _KINDS}}
    parts = {kind: part for part, kind in _KINDS.items()}
    for record in read(file):
        kind = record.pop("kind")
        if kind == "about":
            found["about"] = record
        else:
            found[parts[kind]].append(record)
    return found


def write_network(measured: Mapping[str, Any], file: Path = NETWORK) -> None:
    """Writes what `read_network` returns."""
    lines = [{"kind": "about", **measured["about"]}]
    for part, kind in _KINDS.items():
        lines += [{"kind": kind, **record} for record in measured[part]]
    write(file, lines)


def merge_steps(runs: Sequence[Record]) -> Record:
    """Merges runs of `network.py`, and keeps the quantiles of a contender's steps.

    A run takes the place of an earlier one where both measured the same.
    """
    raw = {(link["workers"], link["link"]): link for run in runs for link in run["raw"]}
    records = {
        tuple(record[key] for key in ("job", "workers", "link", "contender")): record
        for run in runs
        for record in run["records"]
    }
    return {
        "about": runs[-1]["about"],
        "raw": [rounded(link) for link in raw.values()],
        "records": [_compact(record) for record in records.values()],
    }


def _compact(record: Record) -> Record:
    return {
        **{key: rounded(record.get(key)) for key in _KEPT},
        "seconds": rounded(np.quantile(record["seconds"], _QUANTILES).tolist()),
        "page_faults": [int(np.median(record["page_faults"]))],
        "stages": rounded(record["stages"]),
    }


def merge_times(runs: Sequence[Record], earlier: Sequence[Record] = ()) -> list[Record]:
    """Merges results of `time_to_accuracy.py`: an entry for each task, workers and link.

    Args:
        runs: Results. They take the place of earlier entries that measured the same.
        earlier: The recorded entries.
    """

    def setup(entry: Record) -> tuple[Any, ...]:
        return *(entry[key] for key in SETUP), entry.get("local_learning_rate")

    entries = {setup(entry): entry for entry in earlier}
    for run in runs:
        for link, measured in run["links"].items():
            entry = {**run["what"], "link": link, "about": run["about"], **measured}
            entries[setup(entry)] = rounded(entry)
    return [*entries.values()]


def rounded(value: Any) -> Any:
    """Rounds floats, also in lists and dicts: to some digits, and large ones to whole numbers."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return round(value) if value >= 10**_DIGITS else float(f"{value:.{_DIGITS}g}")
