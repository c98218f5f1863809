"""Data of several workers: read alike, and compared before it is used.

Reads Python data for TensorFlow's iterators, one iterator after another.

An iterator reads ahead in its own thread, and continues for a while after a program drops it. Two
iterators may thus read one source at the same time; only the newest iterator gets items.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradcomp.groups.agreement import Processes
from tf_gradcomp.groups.messages import log_info
from tf_gradcomp.keras_version import keras
from tf_gradcomp.private import tensorflow as tf_private
from tf_gradcomp.strategy.strategy import MultiWorkerMirroredStrategy

_AHEAD = 10  # Keras' default for `max_queue_size`


class LatestReaderOnly:
    """Serves only the newest of several readers and ends the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: object = None

    def read(self, items: Generator[Any, None, None]) -> Iterator[Any]:
        """Yields `items` until another reader begins."""
        with contextlib.closing(items):
            me = self._newest = object()
            while True:
                with self._lock:
                    if self._newest is not me:
                        return
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item


class PyDatasetReader:
    """Replaces Keras' enqueuer, whose single queue all iterators share.

    TensorFlow reads ahead of the steps, and Keras stops and restarts its enqueuer between epochs.
    With one queue, some batches would get lost and others would be read twice. Here, each iterator
    has its own threads or processes.
    """

    def __init__(self, dataset: Any, order: Callable[[int], Iterable[int]] | None) -> None:
        """Reads a `PyDataset` in the order of its batches, or in the order `order(count)`."""
        self._dataset = dataset
        self._order = order
        self._indices: Iterable[int] | None = None
        self._latest_reader = LatestReaderOnly()

    def start(self, _epoch: int = 0) -> None:
        """Does nothing: an iterator starts reading by itself."""

    def stop(self) -> None:
        """Does nothing: an iterator stops at its end, or when the next iterator begins."""

    def begin_epoch(self) -> None:
        """Draws the order of the epoch; all workers must call it."""
        if self._order is not None and self._dataset.num_batches is not None:
            self._indices = self._order(self._dataset.num_batches)

    def get(self) -> Iterator[Any]:
        """Yields the batches of the epoch, in the same order for any number of threads."""
        indices = self._indices
        if indices is None:
            count = self._dataset.num_batches
            indices = itertools.count() if count is None else range(count)
        return self._latest_reader.read(_batches(self._dataset, indices))


def _batches(dataset: Any, indices: Iterable[int]) -> Generator[Any, None, None]:
    """Yields batches in order, while several batches are prepared in parallel."""
    item: Callable[[int], Any] = dataset.__getitem__
    pool: futures.Executor
    if dataset.use_multiprocessing and dataset.workers > 0:
        pool = futures.ProcessPoolExecutor(
            dataset.workers, initializer=_set_pool_dataset, initargs=(dataset,)
        )
        item = _pool_item
    elif dataset.workers > 1:
        pool = futures.ThreadPoolExecutor(dataset.workers)
    else:
        yield from map(item, indices)
        return
    remaining = iter(indices)
    ahead = dataset.max_queue_size if dataset.max_queue_size > 0 else _AHEAD
    try:
        pending = deque(pool.submit(item, i) for i in itertools.islice(remaining, ahead))
        while pending:
            batch = pending.popleft().result()
            pending.extend(pool.submit(item, i) for i in itertools.islice(remaining, 1))
            yield batch
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_pool_dataset: Any = None  # the dataset that a process of a pool reads


def _set_pool_dataset(dataset: Any) -> None:
    global _pool_dataset
    _pool_dataset = dataset


def _pool_item(index: int) -> Any:
    return _pool_dataset[index]


class GeneratorReader:
    """Reads a Python generator for one call of `fit` or `evaluate`.

    At the end of a call, or of an epoch of validation, TensorFlow has read more batches than were
    used. The next reader of the same generator gets these batches first, so that no batch is lost,
    and all workers continue with the same batch.
    """

    def __init__(self, generator: Iterator[Any]) -> None:
        self._generator = generator
        self._source = _sources.setdefault(generator, _Source())
        self._first = _InspectedBatches()
        self._taken = _IteratorBatches(self._first)

    @property
    def first_batch(self) -> Any:
        """The first batch that Keras has inspected."""
        return self._first.batches[0]

    def __iter__(self) -> Iterator[Any]:
        """Yields the first batches, which Keras inspects and passes to each iterator again."""
        self._source.switch_to(self._first)
        return self._following(self._first)

    def new_iterator(self) -> None:
        """Prepares for a new iterator; called before each iterator is created."""
        self._taken = _IteratorBatches(self._first)

    def use(self, batches: int) -> None:
        """Records the number of used batches of the newest iterator, including the next step's."""
        self._taken.used = batches
        self._first.used = max(self._first.used, batches)

    def read(self) -> Iterator[Any]:
        """Begins to read for the newest iterator."""
        self._source.switch_to(self._taken)
        return itertools.chain(self._first.batches, self._following(self._taken))

    def _following(self, taken: _InspectedBatches | _IteratorBatches) -> Iterator[Any]:
        while True:
            try:
                batch = self._source.take(taken, self._generator)
            except StopIteration:
                return
            yield batch


class _InspectedBatches:
    """The batches that Keras has inspected, and the number that any iterator has used."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.used = 0
        self.first = self

    def add(self, batch: Any) -> None:
        self.batches.append(batch)

    def unused(self) -> Sequence[Any]:
        return ()  # while the same call keeps reading


class _IteratorBatches:
    """The unused batches that one iterator has read after the inspected batches."""

    def __init__(self, first: _InspectedBatches) -> None:
        self.first = first
        self.used = 0  # including the inspected batches
        self._batches: deque[Any] = deque()
        self._used_count = 0  # of used batches before `_batches`

    def add(self, batch: Any) -> None:
        self.unused()
        self._batches.append(batch)

    def unused(self) -> Sequence[Any]:
        while self._batches and len(self.first.batches) + self._used_count < self.used:
            self._batches.popleft()
            self._used_count += 1
        return self._batches


class _Source:
    """The lock and the unused batches that all readers of a generator share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: _InspectedBatches | _IteratorBatches | None = None
        self._unused: deque[Any] = deque()

    def switch_to(self, taken: _InspectedBatches | _IteratorBatches) -> None:
        """Ends the last iterator, and returns its unused batches to the source."""
        with self._lock:
            before, self._taken = self._taken, taken
            if before is None or before is taken:
                return
            self._unused.extendleft(reversed(before.unused()))
            if before.first is not taken.first:
                self._unused.extendleft(reversed(before.first.batches[before.first.used :]))

    def take(self, taken: _InspectedBatches | _IteratorBatches, generator: Iterator[Any]) -> Any:
        """Returns the next batch; raises StopIteration unless `taken` is the newest iterator's."""
        with self._lock:
            if self._taken is not taken:
                raise StopIteration
            batch = self._unused.popleft() if self._unused else next(generator)
            taken.add(batch)
            return batch


_sources: weakref.WeakKeyDictionary[Iterator[Any], _Source] = weakref.WeakKeyDictionary()


_EMPTY = (
    "tf_gradcomp: this worker got an empty batch: the batch of all workers has fewer rows than "
    "there are replicas, or this worker's files have fewer rows than those of another worker. "
    "BatchNormalization keeps its statistics; your own layers return NaN if they take a mean over "
    "the batch. Use dataset.batch(..., drop_remainder=True); for files also .repeat() and "
    "steps_per_epoch."
)
_warned_graphs: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
_PARTS = 8  # the maximum number of compared parts of a batch, such as inputs and labels


def compared_batch(strategy: tf.distribute.Strategy, distributed: Any, *, trains: bool) -> Any:
    """Takes a batch and warns if workers that need equal batches have different ones.

    Also warns if workers train on equal batches of data that each worker keeps whole.

    Returns as many of its rows as a replica gets; None if a worker has its own files, or if there
    is no batch.
    """
    if not isinstance(strategy, MultiWorkerMirroredStrategy):
        return None
    replicas, shared = strategy.num_replicas_in_sync, tf_private.shared_by_workers(distributed)
    if shared is None or replicas == 1:
        local_dataset = tf_private.undistributed(distributed)
        batch = None if local_dataset is None else next(iter(local_dataset.take(1)), None)
        several = strategy.group.processes.size > 1
        if several and trains and local_dataset is not None and _is_kept_whole(local_dataset):
            comparison = _compare(strategy, batch)
            if comparison.all_equal:
                log_info(_SAME)
        return tf.nest.map_structure(lambda part: _rows(part, replicas), batch)
    is_files = shared is not tf_private.undistributed(distributed)
    dataset = shared.batch(2**30) if is_files else shared  # all names at once
    batch = next(iter(dataset.take(1)), None)
    if _compare(strategy, batch).all_differ:
        log_info(_FILES if is_files else _ROWS)
    if is_files or batch is None:
        return None
    return tf.nest.map_structure(lambda part: _rows(part, replicas), batch)


_ROWS = (
    "Workers read this data in different orders: the first batch differs between workers. Each "
    "worker trains on its part of its own batches, so some rows are used twice in an epoch and "
    "others never. Give a seed to what shuffles the data outside of tf.data, such as NumPy, by "
    "keras.utils.set_random_seed(0) at the top of the program. Create equally many datasets on "
    "each worker, list files in the same order, and iterate over a shuffled dataset equally often, "
    "or use .shuffle(reshuffle_each_iteration=False)."
)
_SAME = (
    "All workers train on the same batches of this data: with AutoShardPolicy.OFF, each worker "
    "keeps all rows that it reads. Give each worker its own rows by dataset.shard(workers, rank), "
    "or its own order by .shuffle(..., seed=rank), or do not set the policy."
)
_FILES = (
    "Workers list the files of this data in different orders. Each worker reads its part of its "
    "own list, so some files are read twice and others never. Sort the list, or use "
    "tf.data.Dataset.list_files(..., shuffle=False) or a seed."
)


def _is_kept_whole(dataset: tf.data.Dataset) -> bool:
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return policy == tf.data.experimental.AutoShardPolicy.OFF


class _Comparison(NamedTuple):
    """Which parts of a batch, such as inputs and labels, are equal on all workers.

    Where only some parts differ, such as the inputs, workers have augmented the same rows in other
    ways. Parts of equal entries do not count.
    """

    all_equal: bool
    all_differ: bool


def _compare(strategy: MultiWorkerMirroredStrategy, batch: Any) -> _Comparison:
    flat = tf.nest.flatten(batch, expand_composites=True) if batch is not None else []
    parts = [part for part in flat if part.dtype not in (tf.variant, tf.resource)]
    digests = np.zeros(_PARTS, np.int64)
    for i, part in enumerate(parts[:_PARTS]):
        digests[i] = _digest(np.asarray(part.numpy()))
    telling = digests != 0
    equal = _equal_on_all(strategy.group.processes, digests)[telling]
    return _Comparison(bool(equal.size and equal.all()), bool(equal.size and not equal.any()))


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
    if isinstance(strategy, MultiWorkerMirroredStrategy) and rows < replicas:
        log_info(
            f"The last batch of these arrays has {rows} row{'s' * (rows > 1)} for {replicas} "
            "replicas, so some get an empty batch. Your own layers return NaN if they take a mean "
            "over the batch, and convolutions may end with an error. Trim the arrays to whole "
            "batches: x[: len(x) // batch_size * batch_size]."
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


BATCHES = (
    "number of batches (for data of unequal sizes: dataset.repeat(), and the same steps_per_epoch, "
    "validation_steps or steps on all workers)"
)
_CALLS = ("fit", "evaluate", "predict")


def check_batches(strategy: tf.distribute.Strategy, batches: int | None) -> None:
    """Checks, before Keras goes through data, that all workers end an epoch at the same step.

    The number is None if Keras continues until no worker has any more data.
    """
    if isinstance(strategy, MultiWorkerMirroredStrategy):
        strategy.group.processes.agree({"next action": _current_calls(), BATCHES: batches})


def _current_calls() -> str:
    """Returns the methods of Keras in which this process is, such as `fit` or `evaluate in fit`."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    names = (
        frame.f_code.co_name
        for frame in frames
        if frame.f_code.co_name in _CALLS and isinstance(frame.f_locals.get("self"), keras.Model)
    )
    return " in ".join(dict.fromkeys(names))


def order_of_first(strategy: tf.distribute.Strategy, batches: int) -> list[int]:
    """Returns the batches of an epoch in the first worker's random order, on all workers.

    Otherwise, workers would draw different orders, unless they have equal seeds and draw nothing
    else before.
    """
    order = list(range(batches))
    random.shuffle(order)
    if isinstance(strategy, MultiWorkerMirroredStrategy):
        order = [
            int(i) for i in strategy.group.processes.broadcast_values(np.array(order, np.float64))
        ]
    return order
