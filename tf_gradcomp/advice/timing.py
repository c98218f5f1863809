"""Times functions of TensorFlow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_REPEATS = 7


def seconds_of(run: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    done = run()
    seconds = time.perf_counter() - start
    del done  # giving its memory back is not timed
    return seconds


def call_seconds() -> float:
    """What the call of a function takes that does nothing; the median of some."""
    value = tf.constant(0)
    nothing = tf.function(lambda: tf.identity(value), autograph=False)
    nothing()  # traces
    return statistics.median(seconds_of(nothing) for _ in range(_REPEATS))
