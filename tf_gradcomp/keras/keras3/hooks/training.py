"""Hooks into `fit`, `evaluate` and `predict` of Keras 3: their data, steps and epochs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as _trainer
from keras.src.callbacks.callback_list import CallbackList
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from tf_gradcomp.keras.common.hooks import after_init, on_outputs_of_steps


def on_means_of_steps(mean: Callable[..., Any]) -> None:
    """Has `mean(strategy, outputs, original)` called for the outputs of a step of `fit`.

    Keras asks the strategy for the mean of each over an axis that metrics don't have: TensorFlow
    refuses scalars, and a metric of each class would become one number. Each is a collective, too.
    """
    on_outputs_of_steps(_trainer, "mean", mean)


def on_data(check: Callable[[tf.distribute.Strategy, int | None], None]) -> None:
    """Has `check(strategy, batches)` called where `fit`, `evaluate` or `predict` takes its data.

    `batches` is their number in an epoch: Keras ends it after so many, whatever other workers have.
    It is None where it goes on until no worker has any more. Nothing public tells it beforehand.
    """
    after_init(
        _trainer.TFEpochIterator,
        lambda epochs, _: check(epochs._distribute_strategy, epochs.num_batches),
    )


def on_built(check: Callable[[keras.Model], None]) -> None:
    """Has `check(model)` called where `fit`, `evaluate` and their kin have built model and metrics.

    To know the shapes, Keras takes a batch of the data under a strategy. From a generator it would
    take more, for batches are prefetched, and these would be lost: so it is given one that it has
    kept. A `PyDataset` is asked for one batch alone.
    """
    class_ = _trainer.TensorFlowTrainer
    original = class_._maybe_symbolic_build

    @functools.wraps(original)
    def hooked(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        adapter = getattr(iterator, "data_adapter", None)
        if isinstance(adapter, GeneratorDataAdapter):
            iterator, data_batch = None, adapter._first_batches[0]
        elif isinstance(adapter, PyDatasetAdapter):
            iterator, data_batch = None, adapter._standardize_batch(adapter.py_dataset[0])
        original(self, iterator, data_batch)
        check(self)

    class_._maybe_symbolic_build = hooked


def on_batch_to_build_with(take: Callable[[tf.distribute.Strategy, Any], Any]) -> None:
    """Has `take(strategy, distributed dataset)` return the batch that models are built with.

    Keras takes one from an iterator of its own before it trains; so nothing else is read, or is in
    another order, where this one is taken instead. Where it is None, Keras takes its own.
    """
    class_ = _trainer.TensorFlowTrainer
    original = class_._maybe_symbolic_build

    @functools.wraps(original)
    def hooked(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        adapter = getattr(iterator, "data_adapter", None)
        if adapter is not None and not isinstance(adapter, GeneratorDataAdapter | PyDatasetAdapter):
            data_batch = take(self.distribute_strategy, iterator._distributed_dataset)
            iterator = iterator if data_batch is None else None
        original(self, iterator, data_batch)

    class_._maybe_symbolic_build = hooked


def on_arrays(check: Callable[[tf.distribute.Strategy, int], None]) -> None:
    """Has `check(strategy, rows)` called where Keras takes arrays, with the rows of the last batch.

    Nothing public tells them before they are trained on.
    """

    def rows_of(epochs: Any, _: Any) -> None:
        adapter = epochs.data_adapter
        if isinstance(adapter, ArrayDataAdapter):
            rows = adapter.partial_batch_size or adapter.batch_size
            check(epochs._distribute_strategy, rows)

    after_init(_trainer.TFEpochIterator, rows_of)


def keep_statistics_of_empty_batches(empty: Callable[[tf.Tensor], tf.Tensor | None]) -> None:
    """Has `BatchNormalization` keep its moving statistics as they are where a batch is empty.

    Keras takes the mean over no rows, which is NaN for ever after. Keras 2 has the same exception.

    Args:
        empty: Whether a batch may be empty, as a tensor; None where it cannot.
    """
    original = keras.layers.BatchNormalization._moments

    @functools.wraps(original)
    def hooked(self: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = original(self, inputs, mask)
        is_empty = None if self.synchronized else empty(inputs)
        if is_empty is None:
            return mean, variance
        keep = tuple(tf.cast(v, mean.dtype) for v in (self.moving_mean, self.moving_variance))
        return tf.where(is_empty, keep[0], mean), tf.where(is_empty, keep[1], variance)

    keras.layers.BatchNormalization._moments = hooked


def read_py_datasets(make: Callable[[tf.distribute.Strategy, Any, bool], Any]) -> None:
    """Has `make(strategy, dataset, shuffle)` read each `PyDataset` that Keras trains on.

    Args:
        make: Returns what stands in for Keras' enqueuer, and is told where an epoch begins; None
            where Keras reads by itself.
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


def read_generators(make: Callable[[Iterator[Any]], Any]) -> None:
    """Has `make(generator)` read each Python generator that Keras trains on.

    It is told where an iterator is made, and how many of its batches are used. Nothing public sees
    either.
    """
    init = GeneratorDataAdapter.__init__

    @functools.wraps(init)
    def read(self: Any, generator: Iterator[Any]) -> None:
        self.gradcomp_reader = make(generator)
        init(self, self.gradcomp_reader)
        self.generator = self.gradcomp_reader.read

    GeneratorDataAdapter.__init__ = read
    class_ = _trainer.TFEpochIterator
    iterator, steps = class_._get_iterator, class_._enumerate_iterator

    @functools.wraps(iterator)
    def new_iterator(self: Any) -> Any:
        if isinstance(self.data_adapter, GeneratorDataAdapter):
            self.data_adapter.gradcomp_reader.new_iterator()
        return iterator(self)

    @functools.wraps(steps)
    def counted(self: Any) -> Iterator[Any]:
        for step in steps(self):
            if isinstance(self.data_adapter, GeneratorDataAdapter):
                self.data_adapter.gradcomp_reader.use(self._steps_seen)
            yield step

    class_._get_iterator, class_._enumerate_iterator = new_iterator, counted


def on_epochs(begin: Callable[[keras.Model], None], end: Callable[[keras.Model], None]) -> None:
    """Has `begin(model)` and `end(model)` called before any callback learns of it.

    A callback of our own would have to be in the program's list, on all workers.
    """
    for name, call in (("on_epoch_begin", begin), ("on_epoch_end", end)):
        original = getattr(CallbackList, name)

        def hooked(
            self: Any, *args: Any, original: Any = original, call: Any = call, **kwargs: Any
        ) -> None:
            if isinstance(self.model, keras.Model):
                call(self.model)
            original(self, *args, **kwargs)

        setattr(CallbackList, name, functools.wraps(original)(hooked))


def on_logs(path_of: Callable[..., str]) -> None:
    """Has `TensorBoard` and `CSVLogger` write where `path_of(callback, path)` says.

    `CSVLogger` gives it the path of what takes any file and keeps nothing, too.
    """
    set_model = keras.callbacks.TensorBoard.set_model
    begin = keras.callbacks.CSVLogger.on_train_begin

    @functools.wraps(set_model)
    def of_board(self: Any, model: Any) -> None:
        self.log_dir = path_of(self, self.log_dir)
        set_model(self, model)

    @functools.wraps(begin)
    def of_table(self: Any, logs: Mapping[str, Any] | None = None) -> None:
        self.filename = path_of(self, self.filename, os.devnull)
        begin(self, logs)

    keras.callbacks.TensorBoard.set_model = of_board
    keras.callbacks.CSVLogger.on_train_begin = of_table
