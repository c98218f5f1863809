"""Measures how long functions of TensorFlow take."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

Result = TypeVar("Result")

_REPEATS = 7


def timed(run: Callable[[], Result]) -> tuple[float, Result]:
    """Returns the seconds of a call, and its result; the time to free the result does not count."""
    start = time.perf_counter()
    done = run()
    return time.perf_counter() - start, done


@functools.cache
def call_seconds() -> float:
    """Seconds that calling an empty function takes: a median, measured once in a process."""
    value = tf.constant(0)
    nothing = tf.function(lambda: tf.identity(value), autograph=False)
    nothing()  # traces
    return statistics.median(timed(nothing)[0] for _ in range(_REPEATS))
