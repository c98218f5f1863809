"""Reads Python data for TensorFlow's iterators, one iterator after another.

An iterator reads ahead in its own thread, and continues for a while after a program drops it. Two
iterators may thus read one source at the same time; only the newest iterator gets items.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any

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
