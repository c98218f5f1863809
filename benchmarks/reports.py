"""Runs a program's workers on this machine; each worker prints a report as a line of JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from tf_gradcomp.launch import LocalJob


def reports_of(
    program: str, *args: str, workers: int = 2, variables: Mapping[str, str] | None = None
) -> list[Any]:
    """Runs a program once; returns the reports of its workers, by rank.

    Raises:
        SystemExit: With the job's summary, if a worker fails.
    """
    found = {}

    def take(worker: int, stream: str, line: str) -> None:
        if stream == "stdout" and line.startswith("{"):
            found[worker] = json.loads(line)

    env = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **(variables or {})}
    with LocalJob([sys.executable, program, *args], workers, env=env, on_line=take) as job:
        result = job.run()
    if result.exit_code:
        raise SystemExit("\n".join(result.summary()))
    return [found[worker] for worker in sorted(found)]


def means(reports: list[dict[str, float]]) -> dict[str, float]:
    """Returns the mean of each value over the reports."""
    return {name: statistics.mean(report[name] for report in reports) for name in reports[0]}
