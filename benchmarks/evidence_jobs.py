"""Does a training or a timing of the evidence."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import records
import simulated
from encoding import Encoding
from pool import Work
from simulated import Training

Run: TypeAlias = Training | Encoding

EPOCH = 22  # steps in which each of the digits is seen once
EVALUATIONS = 4  # of tasks that take longer to evaluate
_ENCODING_SECONDS = 0.3  # for each learner


def expected_seconds(run: Run) -> float:
    """Returns about how long a run takes on one core."""
    if isinstance(run, Encoding):
        return simulated.START_SECONDS + _ENCODING_SECONDS * run.learners
    return simulated.expected_seconds(run)


def steps_between_evaluations(run: Training) -> int:
    """Returns the number of steps between two points of a run's curve."""
    return EPOCH if run.task == "digits" else -(-run.steps // EVALUATIONS)


def measure(run: Run) -> dict[str, Any]:
    """Does a run; returns its record."""
    if isinstance(run, Encoding):
        measured = run.measure()
    else:
        measured = simulated.train(run, steps_between_evaluations(run))
    return {**dataclasses.asdict(run), **records.rounded(measured)}


def said(record: dict[str, Any]) -> str:
    """Returns the line that is printed of a record."""
    if "quality" in record:
        return f"{record['quality']:.3f}, {record['seconds']:.0f} s"
    return f"{record['encode_ms']:.1f} and {record['decode_ms']:.1f} ms"


WORK = Work(measure, expected_seconds, said)
