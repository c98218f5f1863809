"""Waiting times of workers, from arguments or environment variables."""

from __future__ import annotations

import math
import os
from typing import Any

from tf_gradcomp.environment import HEARTBEAT_TIMEOUT, STALL_AFTER, START_TIMEOUT

HEARTBEATS = 60.0  # seconds; a worker may pause for half of it, and with TensorFlow's own 10 for 5
STALLS = 30.0  # seconds, so that a pause is reported before the heartbeats of the worker are missed

STARTS = 3600.0  # seconds


def heartbeat_timeout(given: float | None) -> float:
    """Returns the seconds after which TensorFlow considers a silent worker lost."""
    return _seconds("heartbeat_timeout", given, HEARTBEAT_TIMEOUT, HEARTBEATS)


def stall_after(given: float | None) -> float:
    """Returns the seconds in a collective after which a worker reports a stall; 0 means never."""
    return _seconds("stall_after", given, STALL_AFTER, STALLS, or_never=True)


def start_timeout() -> float:
    """Returns the seconds in which all workers must have started."""
    return _seconds("start_timeout", None, START_TIMEOUT, STARTS)


def _seconds(
    name: str, given: float | None, variable: str, default: float, *, or_never: bool = False
) -> float:
    """Returns the time in seconds: the argument, the environment's value, or the default.

    Raises:
        ValueError: If it is not a number, or less than a second.
    """
    value: Any = os.environ.get(variable) if given is None else given
    if value is None:
        return default
    received = f"{variable if given is None else name}={value!r}"
    seconds = _number(value)
    if 1 <= seconds < math.inf or (or_never and seconds == 0):
        return seconds
    never = ", or 0 for never" if or_never else ""
    raise ValueError(
        f"tf_gradcomp: expected a {name.replace('_', ' ')} of at least 1 "
        f"second{never}; received {received}."
    )


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
