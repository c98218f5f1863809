"""The one module that touches private API of Keras 3.

Each function says why the public API is not enough. `tests/test_private_api.py` has one test for
each name used here, and fails by that name when a release changes it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import h5py
import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as _trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.callbacks.callback_list import CallbackList
from keras.src.legacy.saving import legacy_h5_format as _legacy_h5
from keras.src.losses import loss as _loss
from keras.src.saving import saving_lib as _saving_lib
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.utils import file_utils as _file_utils

from tf_gradcomp.keras.common.after_init import after_init
from tf_gradcomp.keras.common.behaving_as import behaving_as
from tf_gradcomp.keras.common.outputs_of_steps import on_outputs_of_steps


def build(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Creates an optimizer's variables, if there are none; private in Keras 2."""
    if not optimizer.built:
        optimizer.build(variables)


def own_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables of an optimizer, without those of one that it wraps; private in Keras 2."""
    return list(optimizer.variables)


_applying: list[keras.optimizers.Optimizer] = []  # those that `applying_at_once` is at


def applying() -> keras.optimizers.Optimizer | None:
    """The optimizer that applies sums now; None if none does."""
    return _applying[-1] if _applying else None


@contextlib.contextmanager
def applying_at_once(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Within this context, the optimizer applies gradients as they are: sums over the replicas.

    It sums nothing, and Keras 3 has no public switch for that. It goes without Keras' branches: to
    accumulate gradients, and to overwrite weights by their averages, Keras calls `merge_call`
    within a `tf.cond`, which no strategy allows. It would also accumulate, and undo a loss scale, a
    second time after the exchange. `iterations` goes on counting updates, as Adam's bias correction
    needs. The context is to be entered across replicas, for those of one process run in turn.
    """
    steps = optimizer.gradient_accumulation_steps
    frequency = optimizer.ema_overwrite_frequency
    scale = optimizer.loss_scale_factor
    optimizer.gradient_accumulation_steps = None
    optimizer.ema_overwrite_frequency = None
    optimizer.loss_scale_factor = None
    overrides: dict[str, Any] = {"_all_reduce_sum_gradients": lambda self, pairs: pairs}
    if steps:
        overrides["iterations"] = property(lambda self: self._iterations // steps)
    _applying.append(optimizer)
    try:
        with behaving_as(optimizer, **overrides):
            yield
    finally:
        _applying.remove(optimizer)
        optimizer.gradient_accumulation_steps = steps
        optimizer.ema_overwrite_frequency = frequency
        optimizer.loss_scale_factor = scale


def slots(
    optimizer: keras.optimizers.Optimizer, kind: str, variables: Sequence[keras.Variable]
) -> list[keras.Variable]:
    """The `"momentums"`, `"velocities"` or `"velocity_hats"` of variables, which are private."""
    of_all = getattr(optimizer, f"_{kind}")
    return [of_all[variable_index(optimizer, variable)] for variable in variables]


def variable_index(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """The place of a variable, or of a replica's part of it, among those of an optimizer.

    There is no public name for it.
    """
    return optimizer._get_variable_index(variable)


def accumulators(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The sums of gradients of an optimizer that accumulates: no public name."""
    return optimizer._accumulated_gradients


def nadam_product(optimizer: keras.optimizers.Nadam) -> keras.Variable:
    """The product of all momentum coefficients so far, which has no public name."""
    return optimizer._u_product


def clip(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """Clips as the optimizer would in `apply`; publicly it does so there only.

    Keras 2 needs the gradients' variables for it, and this one does not.
    """
    return list(optimizer._clip_gradients(list(gradients)))


def update_averages(optimizer: keras.optimizers.Optimizer) -> None:
    """Takes the weights into their moving averages, if it keeps any; called in a replica.

    Publicly only `apply` does so.
    """
    optimizer._update_model_variables_moving_average(optimizer._trainable_variables)


def overwrite_by_averages(optimizer: keras.optimizers.Optimizer) -> None:
    """Overwrites weights by their moving averages; called across replicas.

    The public `finalize_variable_values` also does what else an optimizer does in the end.
    """
    optimizer._overwrite_model_variables_with_average_value(optimizer._trainable_variables)


def step_counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """The variable behind `optimizer.iterations`, which counts accumulating steps as well."""
    return optimizer._iterations


def on_loss_scaled_apply(handles: Callable[[Any], bool], apply: Callable[..., None]) -> None:
    """Has `apply(scaler, grads, variables, original)` called where `handles` its inner optimizer.

    Keras puts a `LossScaleOptimizer` around any optimizer under `mixed_float16`. It decides by the
    gradients of its own worker alone whether to skip a step; where workers differ, all hang.
    """
    original = keras.optimizers.LossScaleOptimizer.apply

    @functools.wraps(original)
    def hooked(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        if handles(self.inner_optimizer):
            apply(self, grads, trainable_variables, functools.partial(original, self))
        else:
            original(self, grads, trainable_variables)

    keras.optimizers.LossScaleOptimizer.apply = hooked


def on_scaler_load(load: Callable[[Any, Any, Callable[..., None]], None]) -> None:
    """Has `load(scaler, store, original)` called where a file is loaded into a loss scaler."""
    class_ = keras.optimizers.LossScaleOptimizer
    original = class_.load_own_variables

    @functools.wraps(original)
    def hooked(self: Any, store: Any) -> None:
        load(self, store, functools.partial(original, self))

    class_.load_own_variables = hooked


def on_check_finite(agree: Callable[[Any, tf.Tensor], tf.Tensor]) -> None:
    """Has `agree(scaler, finite)` called on what a `LossScaleOptimizer` found in its own gradients.

    Without this, a `LossScaleOptimizer` around a plain optimizer or a `MultiOptimizer` skips a step
    on the one worker whose gradients overflowed, while the others wait for it in the reduction.
    """
    original = keras.optimizers.LossScaleOptimizer.check_finite

    @functools.wraps(original)
    def hooked(self: Any, grads: Sequence[Any]) -> tf.Tensor:
        return agree(self, original(self, grads))

    keras.optimizers.LossScaleOptimizer.check_finite = hooked


def on_multi_optimizer(check: Callable[[keras.optimizers.Optimizer], None]) -> None:
    """Has `check(optimizer)` called on each optimizer that a `MultiOptimizer` is built for.

    Keras itself looks at the outermost class of each, and so not into a wrapper.
    """
    cls = getattr(keras.optimizers, "MultiOptimizer", None)  # not in all releases
    if cls is None:
        return
    original = cls.build

    @functools.wraps(original)
    def hooked(self: Any, var_list: Sequence[keras.Variable]) -> None:
        for optimizer in self.optimizers:
            check(optimizer)
        original(self, var_list)

    cls.build = hooked


def on_reduce_gradients(reduce: Callable[..., Any]) -> None:
    """Has `reduce(optimizer, grads_and_vars, original)` called where Keras reduces its gradients.

    It is the only place that knows a tensor to be the gradient of a variable: what reaches the
    cross-device ops is a list of tensors, with nothing to tell it from batch statistics.
    """
    original = TFOptimizer._all_reduce_sum_gradients

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(original)
    def hooked(self: Any, grads_and_vars: Any) -> Any:
        return reduce(self, grads_and_vars, functools.partial(original, self))

    TFOptimizer._all_reduce_sum_gradients = hooked


def on_averages_swapped(swap: Callable[..., None]) -> None:
    """Has `swap(optimizer, swap_one, original)` called where `SwapEMAWeights` looks for averages.

    It looks into a loss scaler, or into a `MultiOptimizer`, and no deeper.
    """
    class_ = keras.callbacks.SwapEMAWeights
    original = class_._apply_to_ema_optimizers

    @functools.wraps(original)
    def hooked(self: Any, tf_fn: Callable[[Any], None], backend_fn: Any) -> None:
        swap(self.model.optimizer, tf_fn, functools.partial(original, self, tf_fn, backend_fn))

    class_._apply_to_ema_optimizers = hooked


def on_loss_of_one_number(tell: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Has `tell()` called where a loss function returns one number, in place of one for each row.

    Keras divides a mean over rows by the number of replicas, but takes such a number as it is: the
    gradients, which are summed, are then as many times too large. Nothing public sees it. Where
    Keras divides, `otherwise()` is called.
    """
    original = _loss.reduce_values

    @functools.wraps(original)
    def hooked(
        values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
    ) -> Any:
        if reduction not in (None, "none", "sum"):
            (tell if tuple(values.shape) == () else otherwise)()
        return original(values, sample_weight, reduction)

    _loss.reduce_values = hooked


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


def optimizer_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables an optimizer was built for; there is no public list of them."""
    return optimizer._trainable_variables


def callbacks_of_fit() -> list[keras.callbacks.Callback] | None:
    """Called by a callback in `set_model`: all callbacks of this `fit`, in order, if known.

    Keras gives a callback no way to the list it is in.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackList):
            return caller.callbacks
        frame = frame.f_back
    return None


def initial_place(model: keras.Model, _: int | None) -> tuple[int, int]:
    """The epoch, and the step, at which `BackupAndRestore` has `fit` go on; no public name."""
    return model._initial_epoch or 0, 0


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """The model and all layers in it, at any depth, each before those within it.

    The public `model.layers` has those of the first level only.
    """
    return list(model._flatten_layers())


_Write = Callable[[IO[bytes]], Any]
_Save = Callable[[keras.Model, str, _Write | None, Callable[[], Any]], None]


def on_save(save: _Save, leaves_out_optimizer: Callable[[keras.Model, str], bool]) -> None:
    """Has `save(model, path, write, original)` called where Keras 3 writes a file of a model.

    `write` writes it into an open file; it is None where Keras writes several files, or to a URL.
    All public functions and callbacks come here. The optimizer is left out of files in Keras' old
    HDF5 format if `leaves_out_optimizer(model, path)` says so. HDF5 files are written in memory
    first, for HDF5 ends the process where the disk is full.
    """
    original = _saving_lib.save_model

    @functools.wraps(original)
    def save_model(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        as_usual = functools.partial(original, model, filepath, *args, **kwargs)
        if isinstance(filepath, io.IOBase):
            as_usual()
            return
        one_file = str(filepath).endswith(".keras") and not _file_utils.is_remote_path(filepath)
        write = (lambda file: original(model, file, *args, **kwargs)) if one_file else None
        save(model, str(filepath), write, as_usual)

    _saving_lib.save_model = save_model
    _on_save_weights(save)
    _on_save_legacy(save, leaves_out_optimizer)


def _on_save_weights(save: _Save) -> None:
    original = _saving_lib.save_weights_only

    @functools.wraps(original)
    def save_weights(
        model: Any, filepath: Any, max_shard_size: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        def write(file: IO[bytes]) -> None:
            buffer = _NamedBuffer(filepath)
            original(model, buffer, None, *args, **kwargs)
            file.write(buffer.getbuffer())

        one_file = max_shard_size is None and not _file_utils.is_remote_path(filepath)
        as_usual = functools.partial(original, model, filepath, max_shard_size, *args, **kwargs)
        save(model, str(filepath), write if one_file else None, as_usual)

    _saving_lib.save_weights_only = save_weights


def _on_save_legacy(save: _Save, leaves_out_optimizer: Callable[[keras.Model, str], bool]) -> None:
    original = _legacy_h5.save_model_to_hdf5

    @functools.wraps(original)
    def save_model(
        model: Any, filepath: Any, overwrite: bool = True, include_optimizer: bool = True
    ) -> None:
        path = filepath.filename if isinstance(filepath, h5py.File) else os.fspath(filepath)
        if include_optimizer:
            include_optimizer = not leaves_out_optimizer(model, path)

        def write(file: IO[bytes]) -> None:
            buffer = io.BytesIO()
            with h5py.File(buffer, "w") as in_memory:
                original(model, in_memory, overwrite, include_optimizer)
            file.write(buffer.getbuffer())

        as_usual = functools.partial(original, model, filepath, overwrite, include_optimizer)
        if isinstance(filepath, h5py.File):
            as_usual()
        else:
            save(model, path, write, as_usual)

    _legacy_h5.save_model_to_hdf5 = save_model


def on_broken_file(describe: Callable[[str], str]) -> None:
    """Adds `describe(path)` to the error of a model's file that cannot be read.

    Keras' own errors name neither the file nor what to do.
    """
    for name, place in (("load_model", 0), ("load_weights_only", 1)):
        original = getattr(_saving_lib, name)

        def hooked(*args: Any, original: Any = original, place: int = place, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except (OSError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
                path = args[place] if len(args) > place else kwargs.get("filepath")
                of_file = isinstance(error, OSError | zipfile.BadZipFile)
                of_file = of_file or "Unable to " in str(error)  # as h5py says it
                if of_file and isinstance(path, str | os.PathLike) and os.path.isfile(path):
                    error.add_note(describe(os.fspath(path)))
                raise

        setattr(_saving_lib, name, functools.wraps(original)(hooked))


class _NamedBuffer(io.BytesIO):
    """A buffer that Keras takes for a file of a name, by which it knows the format."""

    def __init__(self, name: Any, content: bytes = b"") -> None:
        super().__init__(content)
        self._name = str(name)

    def __str__(self) -> str:
        return self._name


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


class Backup(NamedTuple):
    """Paths and progress that Keras' `BackupAndRestore` keeps private.

    Attributes:
        weights: The path of the weights and the optimizer's state.
        place: The path of the epoch and the batch.
        former_weights: Where the backup before is, with `double_checkpoint`.
        former_place: Likewise.
        trained: The epoch and the batch to save.
    """

    weights: str
    place: str
    former_weights: str
    former_place: str
    trained: dict[str, int]

    @classmethod
    def of(cls, callback: keras.callbacks.BackupAndRestore) -> Backup:
        """Returns that of a callback, as it is now."""
        return cls(
            callback._weights_path,
            callback._training_metadata_path,
            callback._prev_weights_path,
            callback._prev_training_metadata_path,
            {"epoch": callback._current_epoch, "batch": callback._last_batch_seen},
        )


_OnBackup = Callable[[keras.callbacks.BackupAndRestore, Callable[[], None]], None]


def on_backups(save: _OnBackup, restore: _OnBackup, delete: _OnBackup) -> None:
    """Has each called with `(callback, original)` where `BackupAndRestore` does what its name says.

    Keras overwrites its only backup.
    """
    class_ = keras.callbacks.BackupAndRestore
    hooks = {"_save_model": save, "on_train_begin": restore, "on_train_end": delete}
    for name, hook in hooks.items():
        original = getattr(class_, name)

        def hooked(
            self: Any, logs: Any = None, original: Any = original, hook: _OnBackup = hook
        ) -> None:
            hook(self, functools.partial(original, self))

        setattr(class_, name, functools.wraps(original)(hooked))


def start_at(model: keras.Model, epoch: int) -> None:
    """Has `fit` go on at an epoch; only Keras' own callback can."""
    model._initial_epoch = epoch


def weights_in_hdf5(model: keras.Model) -> io.BytesIO:
    """Returns what `save_weights` writes; publicly it takes paths only."""
    buffer = _NamedBuffer("latest.weights.h5")
    _saving_lib.save_weights_only.__wrapped__(model, buffer)
    return buffer


def load_hdf5(model: keras.Model, path: str) -> None:
    """Loads a file that `weights_in_hdf5` was written to; publicly its name must end in a way."""
    with open(path, "rb") as file:
        _saving_lib.load_weights_only(model, _NamedBuffer("latest.weights.h5", file.read()))
