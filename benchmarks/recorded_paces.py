"""Times of steps that an earlier run of time_to_accuracy.py has recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import click
import records

Row: TypeAlias = Mapping[str, Any]
_SECONDS = "seconds of a step"


class RecordedPaces(NamedTuple):
    """The times of steps in one setup.

    Attributes:
        machine: The machine on which they were measured.
        rows: A row for each method, by its printed name.
        measured: The speed of the link, where it was recorded.
    """

    machine: str
    rows: Mapping[str, Row]
    measured: Mapping[str, Any] | None

    def check(self, methods: Iterable[str]) -> None:
        """Checks that a time is recorded for each method.

        Raises:
            click.UsageError: If a time is missing.
        """
        missing = [name for name in methods if name not in self.rows]
        if missing:
            raise click.UsageError(
                f"--paces: no time of a step is recorded for {', '.join(missing)}; expected some "
                f"of {', '.join(self.rows)}. Choose the methods by -c, or measure without --paces."
            )

    def seconds(self, method: str) -> float:
        """Returns the seconds of a step."""
        return self.rows[method][_SECONDS]

    def chosen(self, method: str) -> str:
        """Returns the compressor that was used; for `auto`, its choice."""
        return self.rows[method]["chosen"]


def read(file: Path, **setup: Any) -> RecordedPaces:
    """Reads the times of a setup.

    Args:
        file: A result of time_to_accuracy.py, or `records/time_to_accuracy.json`.
        **setup: The task, optimizer, workers, delay and link.

    Raises:
        click.UsageError: If the file has no times of that setup.
    """
    found = json.loads(file.read_text())
    if "links" in found:
        found = records.of_times([found])
    wanted = tuple(setup[key] for key in records.SETUP)
    for one in found["setups"]:
        if tuple(one[key] for key in records.SETUP) == wanted:
            timed = {row["method"]: row for row in one["rows"] if row[_SECONDS] is not None}
            about = one["about"]
            machine = about.get(records.PACES, about)["machine"]
            return RecordedPaces(machine, timed, one.get("measured"))
    raise click.UsageError(f"--paces: {file} has no times of {setup}.")
