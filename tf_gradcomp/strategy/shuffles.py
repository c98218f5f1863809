"""Shuffles that are alike on all workers of a job, if the program sets no seed.

Workers divide each batch of the data that they all read, so they must read it in the same order.
The chief draws a seed at random when the strategy is created. All workers give seeds that follow
from it to shuffles without a seed.

This is not TensorFlow's global seed: with a global seed, the functions of `Dataset.map` would draw
the same numbers again in each epoch. A program's global seed wins at any time.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.groups.agreement import Processes
from tf_gradcomp.private.patching import patch, with_methods
from tf_gradcomp.strategy import random_numbers

NO_GLOBAL_SEED = 87654321  # what TensorFlow uses in place of a global seed
_STRIDE = 0x9E3779B1
_job_seed: int | None = None  # None without other workers
_counts = itertools.count()


def share_seed(processes: Processes) -> None:
    """Has all workers of a job shuffle by a random seed of the chief."""
    global _job_seed
    seed = secrets.randbits(31)
    _job_seed = int(processes.broadcast_values(np.array([seed], np.float64))[0])


def _next_seed() -> int | None:
    """Returns the seed of the next shuffle, equal on all workers; None if a program decides."""
    if _job_seed is None or random_numbers.builds_pipeline() or not tf.executing_eagerly():
        return None
    # With an op's seed, this call draws nothing from the program's sequence of seeds.
    if tf.compat.v1.random.get_seed(0)[0] != NO_GLOBAL_SEED:
        return None
    return (_job_seed + next(_counts) * _STRIDE) % (2**31 - 1)


@patch(
    "tensorflow.data.Dataset.shuffle",
    why="Without a seed, workers shuffle in different orders, and use some rows twice.",
    test="test_shuffle",
)
def shuffle(
    original: Any, self: Any, buffer_size: Any, seed: Any = None, *args: Any, **kwargs: Any
) -> tf.data.Dataset:
    """Shuffles a dataset without a seed in the same order on all workers.

    A dataset that a worker builds by itself, or within a function of another dataset, is shuffled
    as by TensorFlow.
    """
    seed = _next_seed() if seed is None else seed
    return original(self, buffer_size, seed, *args, **kwargs)


class EpochOrder:
    """The order of the rows of arrays, a new one in each epoch, equal on all workers.

    Args:
        rows: The number of rows.
        within: The number of consecutive rows among which rows change places.
    """

    def __init__(self, rows: int, within: int) -> None:
        self._seed = _next_seed()
        self._epochs = itertools.count()
        self._within = within
        self._order = np.arange(rows)

    def begin_epoch(self) -> None:
        """Draws the order of the next epoch; all workers must call it."""
        if self._seed is None:
            return
        draws = np.random.default_rng([self._seed, next(self._epochs)])
        order = np.arange(len(self._order))
        for start in range(0, len(order), self._within):
            draws.shuffle(order[start : start + self._within])
        self._order = order

    @contextlib.contextmanager
    def replacing_shuffle(self) -> Iterator[None]:
        """Within this context, datasets are built in which `tf.random.shuffle` has this order."""
        if self._seed is None:
            yield
            return
        self.begin_epoch()
        original = tf.random.shuffle

        @tf.autograph.experimental.do_not_convert
        def shuffled(value: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
            if tf.executing_eagerly():  # another thread
                return original(value, *args, **kwargs)
            order = tf.numpy_function(lambda rows: self._order[rows], [value], value.dtype)
            return tf.ensure_shape(order, value.shape)

        with with_methods(tf.random, shuffle=shuffled):
            yield
