"""Counts a worker's steps and collectives, for a thread that watches them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp.private import tensorflow as tf_private


class Position(NamedTuple):
    """A worker's progress; the numbers of all workers are comparable."""

    events: int  # beginnings and ends of collectives
    steps: int  # the number of calls of `Strategy.run`

    @property
    def in_collective(self) -> bool:
        """Returns whether the worker waits for others."""
        return self.events % 2 == 1


class Progress:
    """Counts the steps of a strategy, and the beginnings and ends of its collectives.

    Nothing waits for a counter.
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._events = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._steps = tf.Variable(0, trainable=False, dtype=tf.int64)

    @tf.autograph.experimental.do_not_convert
    def count_step(self, inputs: Any) -> None:
        """Counts a step, which begins once the tensors in the nested `inputs` are computed."""
        _count(self._steps, tf.nest.flatten(inputs, expand_composites=True))

    @tf.autograph.experimental.do_not_convert
    def count_event(self, tensors: Sequence[Any]) -> None:
        """Counts the beginning or the end of a collective, once `tensors` are computed."""
        _count(self._events, tensors)

    def position(self) -> Position:
        """Returns this worker's position."""
        return Position(int(self._events.numpy()), int(self._steps.numpy()))


def _count(counter: tf.Variable, after: Sequence[Any]) -> None:
    if tf_private.in_xla():  # which may be on another device
        return
    with tf.control_dependencies([one for one in after if isinstance(one, tf.Tensor)]):
        counter.assign_add(1, read_value=False)
