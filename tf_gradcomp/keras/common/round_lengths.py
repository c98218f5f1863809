"""The number of steps in a round of local steps: constant or scheduled."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.settings import is_whole_number
from tf_gradcomp.keras.common.version import keras

Schedule: TypeAlias = int | Sequence[Sequence[int]] | Callable[[int], int]

_COMPARED = (*range(1000), *range(1000, 100_000, 100))  # steps at which functions must agree
_EXPECTED = (
    "LocalSteps: expected a whole number of steps, at least 1; or a list of (step, number) that "
    "starts at step 0, with steps ascending; or a function of the step. Received "
)


def checked_schedule(steps: Any) -> Schedule:
    """Returns the plain form of a schedule from a number, list, function or config.

    Raises:
        ValueError: If it is not a schedule.
    """
    if isinstance(steps, Mapping):
        steps = keras.saving.deserialize_keras_object(dict(steps))
    if callable(steps):
        return steps
    if is_whole_number(steps, 1, 2**31):
        return int(steps)
    if not isinstance(steps, Sequence) or isinstance(steps, str):
        raise ValueError(f"{_EXPECTED}{steps!r}.")
    before = -1
    for pair in steps:
        good = isinstance(pair, Sequence) and len(pair) == 2 and is_whole_number(pair[1], 1, 2**31)
        if not good or not is_whole_number(pair[0], before + 1, 2**62):
            raise ValueError(f"{_EXPECTED}{steps!r}.")
        before = pair[0]
    if not steps or steps[0][0] != 0:
        raise ValueError(f"{_EXPECTED}{steps!r}.")
    return [[int(step), int(number)] for step, number in steps]


def config_of_schedule(schedule: Schedule) -> Any:
    """Returns the config of a schedule, for `checked_schedule`."""
    return keras.saving.serialize_keras_object(schedule) if callable(schedule) else schedule


def fact_of_schedule(schedule: Schedule) -> Any:
    """Returns the comparable form of a schedule.

    The form of a function is its name, and a digest of the lengths that it returns: workers may
    have different functions of one name.
    """
    if not callable(schedule):
        return schedule
    name = getattr(schedule, "__qualname__", str(type(schedule)))
    lengths = [_length_if_any(schedule, step) for step in _COMPARED]
    digest = hashlib.sha256(repr(lengths).encode()).hexdigest()
    return f"{name}, which begins with {lengths[0]} steps (digest of all: {digest[:8]})"


def _length_if_any(schedule: Callable[[int], int], step: int) -> str:
    """Returns a length as text; if the function fails, so will the step that needs the length."""
    with contextlib.suppress(Exception):
        return str(schedule(step))
    return ""


def length_at(schedule: Schedule, step: tf.Tensor) -> tf.Tensor:
    """Returns the number of steps of a round that begins now.

    Args:
        schedule: As `checked_schedule` returns it.
        step: int64 scalar, the steps of training so far.
    """
    if callable(schedule):
        length = tf.numpy_function(lambda now: _called(schedule, now), [step], tf.int64)
        return tf.ensure_shape(length, [])
    if isinstance(schedule, int):
        return tf.constant(schedule, tf.int64)
    begins, numbers = (tf.constant(column, tf.int64) for column in zip(*schedule, strict=True))
    return tf.gather(numbers, tf.searchsorted(begins, step[tf.newaxis], "right")[0] - 1)


def _called(schedule: Callable[[int], int], step: np.int64) -> np.int64:
    length = schedule(int(step))
    if not is_whole_number(length, 1, 2**31):
        raise ValueError(
            f"LocalSteps: at step {step}, the schedule must return a whole number of at least 1; "
            f"it returned {length!r}."
        )
    return np.int64(length)
