"""Recorded results, kept in the repository: `publish.py` and `evidence.py` write and read them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

FOLDER = Path(__file__).with_name("records")
NETWORK = FOLDER / "network.json"
TIMES = FOLDER / "time_to_accuracy.json"
EVIDENCE = FOLDER / "evidence"  # a file for each run
LOCAL_STEPS = FOLDER / "local_steps"  # a file for each run
SETUP = ("task", "optimizer", "workers", "delay", "link")  # of a time to accuracy
PACES = "times of steps"  # where they were measured, if in an earlier run
_QUANTILES = (0, 0.25, 0.5, 0.75, 1)
_KEPT = ("job", "workers", "link", "contender", "counted_bytes", "carried_bytes", "predicted")
_DIGITS = 5  # more than a measured time has

Measured: TypeAlias = dict[str, Any]


def read(file: Path) -> Measured:
    """Reads a record."""
    return json.loads(file.read_text())


def write(measured: Measured, file: Path) -> None:
    """Writes a record; each part of a list has a line of its own, so that changes are seen."""
    parts = [f" {json.dumps(name)}: {_text(value)}" for name, value in measured.items()]
    file.parent.mkdir(exist_ok=True)
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _text(value: Any) -> str:
    if not (isinstance(value, list) and value and isinstance(value[0], dict)):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"


def of_network(runs: Sequence[Measured]) -> Measured:
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


def _compact(record: Measured) -> Measured:
    stages, faults = record["stages"], record["page_faults"]
    return {
        **{key: rounded(record.get(key)) for key in _KEPT},
        "seconds": rounded(np.quantile(record["seconds"], _QUANTILES).tolist()),
        "page_faults": [int(np.median(faults))],
        "stages": rounded(stages),
    }


def rounded(value: Any) -> Any:
    """Rounds floats, also in lists and dicts: to some digits, and large ones to whole numbers."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return round(value) if value >= 10**_DIGITS else float(f"{value:.{_DIGITS}g}")


def of_times(runs: Sequence[Measured], earlier: Sequence[Measured] = ()) -> Measured:
    """Gathers results of `time_to_accuracy.py`: an entry for each task, workers and link.

    Args:
        runs: Results. They take the place of earlier entries that measured the same.
        earlier: Entries of the record so far.
    """
    found = {_setup(entry): entry for entry in earlier}
    for run in runs:
        for link, of_link in run["links"].items():
            entry = {**run["what"], "link": link, "about": run["about"], **of_link}
            found[_setup(entry)] = rounded(entry)
    return {"setups": [*found.values()]}


def _setup(entry: Measured) -> tuple[Any, ...]:
    return *(entry[key] for key in SETUP), entry.get("local_learning_rate")
