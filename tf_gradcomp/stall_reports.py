"""Lines by which a worker reports that it waits for other workers."""

from __future__ import annotations

import re

_REPORT = re.compile(
    r"\bWaiting for [\d.e+]+ seconds, (in step \d+|before the first step)\."
    r"|\bContinues after \d+ seconds\."
)


def waits(seconds: float, steps: int) -> str:
    """Returns how long a worker has waited, and in which step; 0 is before the first step."""
    return f"Waiting for {seconds:g} seconds, {step_name(steps)}."


def continues(seconds: float) -> str:
    """Returns the line of a worker that has waited and now continues."""
    return f"Continues after {seconds:.0f} seconds."


def step_name(steps: int) -> str:
    """Returns the words for a step of a worker."""
    return f"in step {steps}" if steps else "before the first step"


def is_report(line: str) -> bool:
    """Whether a line of a worker's output is such a report, in any format of logging."""
    return bool(_REPORT.search(line))
