"""The time after which TensorFlow considers a silent worker lost."""

from __future__ import annotations

import math
import os
from typing import Any

from tf_gradcomp.environment import HEARTBEAT_TIMEOUT

DEFAULT = 60.0  # seconds; a worker may pause for half of it, and with TensorFlow's own 10 for 5


def heartbeat_timeout(given: float | None) -> float:
    """Returns the timeout in seconds: the argument, the environment's value, or the default.

    Raises:
        ValueError: If it is not a number, or less than a second.
    """
    if given is not None:
        return _checked(given, f"heartbeat_timeout={given!r}")
    text = os.environ.get(HEARTBEAT_TIMEOUT)
    return DEFAULT if text is None else _checked(text, f"{HEARTBEAT_TIMEOUT}={text!r}")


def _checked(value: Any, received: str) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 1 <= seconds < math.inf:
        raise ValueError(
            "MultiWorkerMirroredStrategy: expected a heartbeat timeout of at least 1 second; "
            f"received {received}."
        )
    return seconds
