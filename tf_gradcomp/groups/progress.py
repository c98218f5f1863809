"""Counts how far this worker has come, for a thread that watches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp import tf_private


class Position(NamedTuple):
    """The place that a worker has reached; all workers count alike."""

    turns: int  # the beginnings and the ends of collectives, one after another
    steps: int  # the calls of `Strategy.run`

    @property
    def in_collective(self) -> bool:
        """Tells whether the worker waits for others."""
        return self.turns % 2 == 1


class Progress:
    """Counts the steps of a strategy, and the beginnings and ends of its collectives.

    Nothing waits for a counter.
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._turns = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._steps = tf.Variable(0, trainable=False, dtype=tf.int64)

    @tf.autograph.experimental.do_not_convert
    def step(self, given: Any) -> None:
        """Counts a step, which begins once the tensors in a nested structure are there."""
        _count(self._steps, tf.nest.flatten(given, expand_composites=True))

    @tf.autograph.experimental.do_not_convert
    def turn(self, tensors: Sequence[Any]) -> None:
        """Counts that a collective begins or ends, which it does once these tensors are there."""
        _count(self._turns, tensors)

    def position(self) -> Position:
        """Returns how far this worker has come."""
        return Position(int(self._turns.numpy()), int(self._steps.numpy()))


def _count(counter: tf.Variable, after: Sequence[Any]) -> None:
    if tf_private.in_xla():  # which may be on another device
        return
    with tf.control_dependencies([one for one in after if isinstance(one, tf.Tensor)]):
        counter.assign_add(1, read_value=False)
