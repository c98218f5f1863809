"""Means and sums of metrics over the replicas in a step; sums over the workers between steps.

All metrics share one collective in a separate group. The collective starts as soon as the metrics
are known, usually while gradients are still computed, and gradients do not wait for it. With local
steps, the collective follows an exchange, and steps without an exchange have none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.groups.group import outside_scope
from tf_gradcomp.private import tensorflow as tf_private


class PeriodicReduce:
    """Exchanges that are not in every step, and the sums of the latest step with an exchange.

    All traces of a step share the sums. A worker may trace its step alone, for a batch of another
    shape, and must not start a collective alone.

    Args:
        count: The number of exchanges so far, int64; equal on all workers.
        every: Number of exchanges between two sums.
    """

    def __init__(self, count: tf.Variable, every: int = 1) -> None:
        self._count, self._every = count, every
        self._latest_sums: dict[tuple[int, int], tuple[tf.Variable, tf.Variable]] = {}

    @property
    def count(self) -> tf.Tensor:
        """Returns the number of exchanges so far that sums have followed."""
        return self._count.read_value() // self._every

    def latest(self, size: int, several: int) -> tuple[tf.Variable, tf.Variable]:
        """Returns the latest sums, float64 [size], and the number of exchanges at that time.

        `several` is the number of optimizers whose exchanges are counted.
        """
        key = size, several
        if key not in self._latest_sums:
            self._latest_sums[key] = outside_scope(
                lambda: (
                    tf.Variable(tf.zeros([size], tf.float64)),
                    tf.Variable(-1, dtype=tf.int64),
                )
            )
        return self._latest_sums[key]


def means_over_replicas(
    strategy: tf.distribute.Strategy, values: Any, exchanges: Sequence[PeriodicReduce] = ()
) -> Any:
    """Returns the mean of each value of a nested structure over all replicas.

    The means keep the shapes and the float dtypes; they are float64 for all other dtypes, as
    `Strategy.reduce` returns them.

    Args:
        strategy: The strategy.
        values: The values.
        exchanges: If given, the means belong to the latest step that had an exchange.
    """
    parts = _parts(strategy, tf.nest.flatten(values))
    dtypes = [parts_by_replica[0].dtype for parts_by_replica in parts]
    means = [
        tf.cast(total / strategy.num_replicas_in_sync, dtype if dtype.is_floating else tf.float64)
        for total, dtype in zip(_sums(strategy, parts, exchanges), dtypes, strict=True)
    ]
    return tf.nest.pack_sequence_as(values, means)


def sums_over_replicas(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the sums over all replicas, in the shapes and dtypes of the values.

    Variables and tensors have equal shapes on all replicas, and are added as float64.
    """
    parts = _parts(strategy, values)
    return [
        tf.cast(total, parts_by_replica[0].dtype)
        for total, parts_by_replica in zip(_sums(strategy, parts), parts, strict=True)
    ]


def _parts(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> list[list[tf.Tensor]]:
    """Returns the replicas' parts of each value on this worker."""
    if tf_private.in_xla() and tf_private.in_multi_worker_mode(strategy):
        raise ValueError(
            "Metrics of several workers cannot be averaged in code that XLA compiles; use "
            "jit_compile=False in model.compile."
        )
    return [
        [_number(part) for part in strategy.experimental_local_results(value)] for value in values
    ]


def _number(part: Any) -> tf.Tensor:
    try:
        tensor = tf.convert_to_tensor(part)
    except (TypeError, ValueError):
        tensor = None
    dtype = None if tensor is None else tensor.dtype
    if dtype is None or not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        raise ValueError(
            "The values that a step returns, from train_step or from metrics, are averaged over "
            f"the replicas: expected tensors of real numbers; received {part!r}. Leave this value "
            "out, or log it in a callback."
        )
    return tensor


def _sums(
    strategy: tf.distribute.Strategy,
    parts: Sequence[Sequence[tf.Tensor]],
    exchanges: Sequence[PeriodicReduce] = (),
) -> list[tf.Tensor]:
    """The sums over all workers, as float64, of the values of this worker's replicas."""
    if not parts:
        return []
    # Tensors on a GPU are small, and go to the host anyway.
    with tf.device("CPU:0"):
        local_sums = [
            tf.add_n([tf.cast(part, tf.float64) for part in parts_by_replica])
            for parts_by_replica in parts
        ]
        flat = [tf.reshape(total, [-1]) for total in local_sums]
        packed = tf.concat(flat, 0)
        if tf_private.in_multi_worker_mode(strategy):
            total = functools.partial(tf_private.sum_over_workers, strategy, packed)
            seldom = exchanges and packed.shape.is_fully_defined() and not tf.executing_eagerly()
            packed = _latest(total, packed.shape[0], exchanges) if seldom else total()
        split = tf.split(packed, [tf.size(total) for total in flat])
        return [
            tf.reshape(total, tf.shape(like)) for total, like in zip(split, local_sums, strict=True)
        ]


def _latest(
    total: Callable[[], tf.Tensor], size: int, exchanges: Sequence[PeriodicReduce]
) -> tf.Tensor:
    """Returns the total of the latest step that changed the number of exchanges."""
    latest, seen = exchanges[0].latest(size, len(exchanges))
    now = tf.add_n([exchange.count for exchange in exchanges])

    def renew() -> None:
        latest.assign(total())
        seen.assign(now)

    tf.cond(tf.not_equal(now, seen), renew, lambda: None)
    return latest.read_value()


def sums_over_workers(
    strategy: tf.distribute.Strategy, arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns the sums of arrays over the workers, by one collective for each dtype."""
    sums = list(arrays)
    for dtype in sorted({array.dtype.name for array in arrays}):
        indices = [i for i, array in enumerate(arrays) if array.dtype.name == dtype]
        flat = np.concatenate([arrays[i].ravel() for i in indices])
        with tf.device("CPU:0"):
            total = tf_private.sum_over_workers(strategy, tf.constant(flat)).numpy()
        ends = np.cumsum([arrays[i].size for i in indices])[:-1]
        for i, part in zip(indices, np.split(total, ends), strict=True):
            sums[i] = part.reshape(arrays[i].shape)
    return sums
