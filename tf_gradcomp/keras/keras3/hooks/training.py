"""Hooks into `fit`, `evaluate` and `predict` of Keras 3: their data, steps and epochs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.backend.tensorflow import trainer as _trainer
from keras.src.random import seed_generator as _seed_generator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from tf_gradcomp.keras.common.hooks import after_init, on_outputs_of_steps, replace


def on_means_of_steps(mean: Callable[..., Any]) -> None:
    """Has `mean(strategy, outputs, original)` called for the outputs of a step of `fit`."""
    on_outputs_of_steps(_trainer, "mean", mean)


def on_data(check: Callable[[tf.distribute.Strategy, int | None], None]) -> None:
    """Has `check(strategy, batches)` called where `fit`, `evaluate` or `predict` takes its data.

    `batches` is the number of batches in an epoch; None if Keras continues until no worker has any
    more.
    """
    after_init(
        _trainer.TFEpochIterator,
        lambda epochs, _: check(epochs._distribute_strategy, epochs.num_batches),
    )


def on_built(building: Callable[[keras.Model], AbstractContextManager[None]]) -> None:
    """Has `fit`, `evaluate` and related methods build model and metrics within `building(model)`.

    To learn the shapes, Keras takes a batch of the data under a strategy. A generator is
    prefetched, so Keras would take and lose several batches. Keras therefore gets a batch of the
    generator that it has already inspected, and a single batch of a `PyDataset`.
    """

    def hooked(original: Any, self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        adapter = getattr(iterator, "data_adapter", None)
        if isinstance(adapter, GeneratorDataAdapter):
            iterator, data_batch = None, adapter._first_batches[0]
        elif isinstance(adapter, PyDatasetAdapter):
            iterator, data_batch = None, adapter._standardize_batch(adapter.py_dataset[0])
        with building(self):
            original(self, iterator, data_batch)

    replace(keras.Model, "_maybe_symbolic_build", hooked)


def on_build_that_fails(build: Callable[..., bool]) -> None:
    """Has `build(model, batch, error, trace)` called where Keras cannot build a model.

    Keras calls the model with the first part of the batch, only under a strategy. `trace(function,
    ...)` traces a function, and creates the variables of layers. If `build` returns False, Keras'
    error is raised.
    """

    def hooked(original: Any, self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        try:
            original(self, iterator, data_batch)
        except Exception as error:
            if not build(self, data_batch, error, compute_output_spec):
                raise

    replace(keras.Model, "_symbolic_build", hooked)


def on_batch_to_build_with(take: Callable[[tf.distribute.Strategy, Any], Any]) -> None:
    """Has `take(strategy, distributed dataset)` return the batch that models are built with.

    Keras takes a batch from a separate iterator before it trains. With this batch in its place, no
    other batch is read, and the order of batches stays. If `take` returns None, Keras takes its own
    batch.
    """

    def hooked(original: Any, self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        adapter = getattr(iterator, "data_adapter", None)
        if adapter is not None and not isinstance(adapter, GeneratorDataAdapter | PyDatasetAdapter):
            data_batch = take(self.distribute_strategy, iterator._distributed_dataset)
            iterator = iterator if data_batch is None else None
        original(self, iterator, data_batch)

    replace(keras.Model, "_maybe_symbolic_build", hooked)


def on_arrays(check: Callable[[tf.distribute.Strategy, int], None]) -> None:
    """Has `check(strategy, rows)` called with the rows of the last batch, if Keras takes arrays."""

    def rows_of(epochs: Any, _: Any) -> None:
        adapter = epochs.data_adapter
        if isinstance(adapter, ArrayDataAdapter):
            rows = adapter.partial_batch_size or adapter.batch_size
            check(epochs._distribute_strategy, rows)

    after_init(_trainer.TFEpochIterator, rows_of)


def on_seeds(change: Callable[[tf.Tensor, Any], tf.Tensor]) -> None:
    """Has `change(seed, generator)` return each seed that Keras draws with."""

    def hooked(original: Any, self: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        return change(original(self, *args, **kwargs), self)

    replace(keras.random.SeedGenerator, "next", hooked)


def on_global_generator(generator: Callable[[Callable[[], Any]], Any]) -> None:
    """Has `generator(original)` return the generator of draws without a seed."""
    replace(_seed_generator, "global_seed_generator", lambda original: generator(original))


def keep_statistics_of_empty_batches(empty: Callable[[tf.Tensor], tf.Tensor | None]) -> None:
    """Has `BatchNormalization` keep its moving statistics unchanged if a batch is empty.

    `empty` tells whether a batch may be empty, as a tensor; None if it cannot.
    """

    def hooked(original: Any, self: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = original(self, inputs, mask)
        is_empty = None if self.synchronized else empty(inputs)
        if is_empty is None:
            return mean, variance
        keep = tuple(tf.cast(v, mean.dtype) for v in (self.moving_mean, self.moving_variance))
        return tf.where(is_empty, keep[0], mean), tf.where(is_empty, keep[1], variance)

    replace(keras.layers.BatchNormalization, "_moments", hooked)


def read_py_datasets(make: Callable[[tf.distribute.Strategy, Any, bool], Any]) -> None:
    """Has `make(strategy, dataset, shuffle)` read each `PyDataset` that Keras trains on.

    `make` returns the replacement of Keras' enqueuer, or None to leave reading to Keras. The
    replacement's `begin_epoch` is called when an epoch begins.
    """

    def replace(epochs: Any, _: Any) -> None:
        adapter = epochs.data_adapter
        if not isinstance(adapter, PyDatasetAdapter):
            return
        reader = make(epochs._distribute_strategy, adapter.py_dataset, adapter.shuffle)
        if reader is None:
            return
        begin = adapter.on_epoch_begin

        def on_epoch_begin() -> None:
            begin()
            reader.begin_epoch()

        adapter.enqueuer, adapter.on_epoch_begin = reader, on_epoch_begin

    after_init(_trainer.TFEpochIterator, replace)


class _IteratorOnDemand:
    """Creates an iterator of distributed data when a step needs it.

    At the end of each epoch, Keras creates an iterator that it then drops. Iterators of a strategy
    read ahead at once, and their functions would draw random numbers.
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> _IteratorOnDemand:
        return _IteratorOnDemand(self._data)

    def __next__(self) -> Any:
        return next(self.iterator)

    @functools.cached_property
    def iterator(self) -> Any:
        return iter(self._data)


def create_iterators_on_demand() -> None:
    """Creates no iterator of distributed data that Keras would drop unread."""

    def on_demand(original: Any, self: Any) -> Any:
        if isinstance(self.data_adapter, GeneratorDataAdapter | PyDatasetAdapter):
            return original(self)
        return _IteratorOnDemand(original(self))

    def created(original: Any, self: Any) -> Iterator[Any]:
        for begin, end, iterator in original(self):
            yield begin, end, getattr(iterator, "iterator", iterator)

    replace(_trainer.TFEpochIterator, "_get_iterator", on_demand)
    replace(_trainer.TFEpochIterator, "_enumerate_iterator", created)


def read_generators(make: Callable[[Iterator[Any]], Any]) -> None:
    """Has `make(generator)` read each Python generator that Keras trains on.

    The reader's methods are called when an iterator is created, and when batches are used.
    """

    def read(original: Any, self: Any, generator: Iterator[Any]) -> None:
        self.gradcomp_reader = make(generator)
        original(self, self.gradcomp_reader)
        self.generator = self.gradcomp_reader.read

    def new_iterator(original: Any, self: Any) -> Any:
        if isinstance(self.data_adapter, GeneratorDataAdapter):
            self.data_adapter.gradcomp_reader.new_iterator()
        return original(self)

    def counted(original: Any, self: Any) -> Iterator[Any]:
        for step in original(self):
            if isinstance(self.data_adapter, GeneratorDataAdapter):
                self.data_adapter.gradcomp_reader.use(self._steps_seen)
            yield step

    replace(GeneratorDataAdapter, "__init__", read)
    replace(_trainer.TFEpochIterator, "_get_iterator", new_iterator)
    replace(_trainer.TFEpochIterator, "_enumerate_iterator", counted)
