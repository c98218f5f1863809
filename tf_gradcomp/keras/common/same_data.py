"""Checks that all workers read the same data, because each trains on its part of every batch."""

from __future__ import annotations

import hashlib
import sys
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.groups.messages import log_info
from tf_gradcomp.groups.processes import Processes
from tf_gradcomp.private import tensorflow as tf_private
from tf_gradcomp.strategy.strategy import CheckedStrategy

_EMPTY = (
    "tf_gradcomp: this worker got an empty batch: the batch of all workers has fewer rows than "
    "there are replicas, or this worker's files have fewer rows than those of another worker. "
    "BatchNormalization keeps its statistics; your own layers return NaN if they take a mean over "
    "the batch. Use dataset.batch(..., drop_remainder=True); for files also .repeat() and "
    "steps_per_epoch."
)
_warned_graphs: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
_PARTS = 8  # the maximum number of compared parts of a batch, such as inputs and labels


def compared_batch(strategy: tf.distribute.Strategy, distributed: Any) -> Any:
    """Takes a batch and warns if workers that need equal batches have different ones.

    Returns as many of its rows as a replica gets; None if a worker has its own files, or if there
    is no batch.
    """
    if not isinstance(strategy, CheckedStrategy):
        return None
    replicas, shared = strategy.num_replicas_in_sync, tf_private.shared_by_workers(distributed)
    if shared is None or replicas == 1:
        local_dataset = tf_private.undistributed(distributed)
        batch = None if local_dataset is None else next(iter(local_dataset.take(1)), None)
        return tf.nest.map_structure(lambda part: _rows(part, replicas), batch)
    is_files = shared is not tf_private.undistributed(distributed)
    dataset = shared.batch(2**30) if is_files else shared  # all names at once
    batch = next(iter(dataset.take(1)), None)
    flat = tf.nest.flatten(batch, expand_composites=True) if batch is not None else []
    parts = [part for part in flat if part.dtype not in (tf.variant, tf.resource)]
    if _differs(strategy, parts):
        log_info(_FILES if is_files else _ROWS)
    if is_files or batch is None:
        return None
    return tf.nest.map_structure(lambda part: _rows(part, replicas), batch)


_ROWS = (
    "Workers read this data in different orders: the first batch differs between workers. Each "
    "worker trains on its part of its own batches, so some rows are used twice in an epoch and "
    "others never. Call keras.utils.set_random_seed(0) at the top of the program, or "
    ".shuffle(..., seed=0), and list files in the same order on all workers. Iterate over a "
    "shuffled dataset equally often on each worker, or use "
    ".shuffle(reshuffle_each_iteration=False)."
)
_FILES = (
    "Workers list the files of this data in different orders. Each worker reads its part of its "
    "own list, so some files are read twice and others never. Sort the list, or use "
    "tf.data.Dataset.list_files(..., shuffle=False) or a seed."
)


def _differs(strategy: CheckedStrategy, parts: list[tf.Tensor]) -> bool:
    """Returns whether all parts of a batch differ among workers.

    Where only some do, such as the inputs, workers have augmented the same rows in other ways.
    """
    digests = np.zeros(_PARTS, np.int64)
    for i, part in enumerate(parts[:_PARTS]):
        digests[i] = _digest(np.asarray(part.numpy()))
    telling = digests != 0
    equal = _equal_on_all(strategy.group.processes, digests)
    return bool(telling.any()) and not (telling & equal).any()


def _equal_on_all(processes: Processes, values: np.ndarray) -> np.ndarray:
    """Returns which of some int64 numbers are equal on all processes."""
    if processes.size == 1:
        return np.full(values.shape, True)
    with tf.device("CPU:0"):
        rows = processes.gather(tf.constant(values[np.newaxis])).numpy()
    return np.all(rows == rows[0], 0)


def _digest(array: np.ndarray) -> int:
    """Returns a number that differs if arrays differ; 0 for equal entries, which show no order."""
    entries = array.ravel()
    if np.all(entries[:1] == entries):
        return 0
    plain = str(entries.tolist()).encode() if array.dtype == object else array.tobytes()
    return int.from_bytes(hashlib.sha256(plain).digest()[:8], "little", signed=True)


def _rows(part: Any, replicas: int) -> Any:
    """One replica's rows of a part of a batch."""
    if isinstance(part, tf.SparseTensor):
        size = tf.concat([-(-part.dense_shape[:1] // replicas), part.dense_shape[1:]], 0)
        return tf.sparse.slice(part, tf.zeros_like(size), size)
    if not isinstance(part, tf.Tensor | tf.RaggedTensor) or part.shape.rank == 0:
        return part
    return part[: -(-int(tf.shape(part)[0]) // replicas)]


def check_last_batch(strategy: tf.distribute.Strategy, rows: int) -> None:
    """Warns the user if the last batch of arrays has fewer rows than there are replicas."""
    replicas = strategy.num_replicas_in_sync
    if isinstance(strategy, CheckedStrategy) and rows < replicas:
        log_info(
            f"The last batch of these arrays has {rows} rows for {replicas} replicas, so some "
            "replicas get an empty batch. Your own layers return NaN if they take a mean over the "
            "batch, and convolutions may end with an error. Trim the arrays to whole batches: "
            "x[: len(x) // batch_size * batch_size]."
        )


def warn_of_empty_batch(is_empty: tf.Tensor) -> None:
    """Prints a warning on a worker whose batch is empty, once in a step."""
    if tf.executing_eagerly():
        if is_empty:
            tf.print(_EMPTY, output_stream=sys.stderr)
        return
    graph = tf.compat.v1.get_default_graph()
    if graph not in _warned_graphs:
        _warned_graphs.add(graph)
        tf.cond(is_empty, lambda: tf.print(_EMPTY, output_stream=sys.stderr), tf.no_op)
