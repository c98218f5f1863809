"""Times functions of TensorFlow."""

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
    """How long a call takes, and what comes of it: giving its memory back is not timed."""
    start = time.perf_counter()
    done = run()
    return time.perf_counter() - start, done


@functools.cache
def call_seconds() -> float:
    """What the call of a function takes that does nothing; the median of some, once a process."""
    value = tf.constant(0)
    nothing = tf.function(lambda: tf.identity(value), autograph=False)
    nothing()  # traces
    return statistics.median(timed(nothing)[0] for _ in range(_REPEATS))
