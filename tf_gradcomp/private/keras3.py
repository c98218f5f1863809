"""Private API of Keras 3."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec as _compute_output_spec
from keras.src.backend.common import global_state as _global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR as _GLOBAL_GENERATOR
from keras.src.saving import saving_lib as _saving_lib
from keras.src.trainers import data_adapters as _data_adapters
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter as _ArrayDataAdapter,
)
from keras.src.trainers.data_adapters.array_slicing import (
    train_validation_split as _train_validation_split,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter  # noqa: F401

from tf_gradcomp.private.patching import patch, with_methods

# Functions that `patch` replaces. No public function is called in all cases, or knows as much.
REDUCE_GRADIENTS = "keras.src.backend.tensorflow.optimizer.TFOptimizer._all_reduce_sum_gradients"
REDUCE_LOSS = "keras.src.losses.loss.reduce_values"
MOMENTS = "keras.layers.BatchNormalization._moments"
SAVE_MODEL = "keras.src.saving.saving_lib.save_model"
SAVE_WEIGHTS = "keras.src.saving.saving_lib.save_weights_only"


def build(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Creates an optimizer's variables, if there are none; private in Keras 2."""
    if not optimizer.built:
        optimizer.build(variables)


def state_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns an optimizer's own variables, not a wrapped optimizer's; private in Keras 2."""
    return list(optimizer.variables)


_applying: list[keras.optimizers.Optimizer] = []  # within `applying_at_once`


def applying() -> keras.optimizers.Optimizer | None:
    """The optimizer that applies sums now; None if none does."""
    return _applying[-1] if _applying else None


@contextlib.contextmanager
def applying_at_once(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Within this context, the optimizer applies gradients, already summed, unchanged.

    Within this context, the optimizer sums nothing; Keras 3 has no public switch for this. The
    optimizer also skips Keras' branches. To accumulate gradients, and to overwrite weights by their
    averages, Keras calls `merge_call` within a `tf.cond`, which no strategy allows. Keras would
    also accumulate, and undo a loss scale, a second time after the exchange. The counter counts
    updates in this context, as the bias correction of Adam needs, and batches outside. A scheduled
    learning rate is computed once; Keras traces its schedule again for each variable that decays.
    Enter the context across replicas, because the replicas of one process run in turn.
    """
    steps = optimizer.gradient_accumulation_steps
    frequency = optimizer.ema_overwrite_frequency
    scale = optimizer.loss_scale_factor
    optimizer.gradient_accumulation_steps = None
    optimizer.ema_overwrite_frequency = None
    optimizer.loss_scale_factor = None
    counter = step_counter(optimizer)
    if steps:
        counter.assign(counter.value // steps)
    _applying.append(optimizer)
    rate = optimizer.learning_rate
    try:
        with with_methods(
            optimizer,
            _all_reduce_sum_gradients=lambda pairs: pairs,
            _get_current_learning_rate=lambda: rate,
        ):
            yield
    finally:
        _applying.pop()
        if steps:
            counter.assign(counter.value * steps)
        optimizer.gradient_accumulation_steps = steps
        optimizer.ema_overwrite_frequency = frequency
        optimizer.loss_scale_factor = scale


def slots(
    optimizer: keras.optimizers.Optimizer, kind: str, variables: Sequence[keras.Variable]
) -> list[keras.Variable]:
    """The `"momentums"`, `"velocities"` or `"velocity_hats"` of variables, which are private."""
    slots = getattr(optimizer, f"_{kind}")
    return [slots[variable_index(optimizer, variable)] for variable in variables]


def variable_index(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """Returns the index of a variable, or of a replica's part of it, in an optimizer.

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
    """Clips as the optimizer would in `apply`; the public API clips only there.

    Keras 2 needs the gradients' variables for clipping, but Keras 3 does not.
    """
    return list(optimizer._clip_gradients(list(gradients)))


def update_averages(optimizer: keras.optimizers.Optimizer) -> None:
    """Updates the moving averages of the weights, if any; called in a replica.

    Publicly only `apply` does so.
    """
    optimizer._update_model_variables_moving_average(optimizer._trainable_variables)


def overwrite_by_averages(optimizer: keras.optimizers.Optimizer) -> None:
    """Overwrites weights by their moving averages; called across replicas.

    The public `finalize_variable_values` also does the optimizer's other final work.
    """
    optimizer._overwrite_model_variables_with_average_value(optimizer._trainable_variables)


def step_counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """The variable behind `optimizer.iterations`, which counts accumulating steps as well."""
    return optimizer._iterations


def optimizer_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables an optimizer was built for; there is no public list of them."""
    return optimizer._trainable_variables


def initial_position(model: keras.Model, _: int | None) -> tuple[int, int]:
    """The epoch and the step at which `BackupAndRestore` lets `fit` continue; no public name."""
    return model._initial_epoch or 0, 0


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """The model and all layers in it, at any depth, each before those within it.

    The public `model.layers` has the first level only.
    """
    return list(model._flatten_layers())


# The global state of Keras in each thread that runs a step now.
_callers: list[dict[str, Any]] = []


@contextlib.contextmanager
def lending_generator() -> Iterator[None]:
    """Within this context, the threads of replicas draw without a seed as this thread would.

    Keras has a global generator for each thread, and no public API returns it.
    """
    _callers.append(vars(_global_state.GLOBAL_STATE_TRACKER))
    try:
        yield
    finally:
        _callers.pop()


@patch(
    "keras.src.random.seed_generator.global_seed_generator",
    why="Keras keeps it for each thread, and a thread of a replica's step cannot create one.",
    test="test_global_generator",
)
def global_generator(original: Callable[[], Any]) -> keras.random.SeedGenerator:
    """The generator of draws without a seed, in a replica's step that of the calling thread."""
    state = vars(_global_state.GLOBAL_STATE_TRACKER)
    if not _callers or state is _callers[-1] or tf.distribute.in_cross_replica_context():
        return original()
    return _generator_in(_callers[-1])


def _generator_in(state: dict[str, Any]) -> keras.random.SeedGenerator:
    if state.get(_GLOBAL_GENERATOR) is None:
        # A variable of a strategy cannot be created in a traced step. A scope is of one thread.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            state[_GLOBAL_GENERATOR] = thread.submit(keras.random.SeedGenerator).result()
    return state[_GLOBAL_GENERATOR]


def random_states(model: keras.Model) -> list[list[int] | None]:
    """The states of a model's generators of random numbers, which files of Keras leave out.

    The last is the state of the global generator, which no public API returns; None if no draw has
    needed it.
    """
    state = vars(_global_state.GLOBAL_STATE_TRACKER)
    generator = state.get(_GLOBAL_GENERATOR)
    values = [variable.numpy().tolist() for variable in _generator_variables(model)]
    return [*values, None if generator is None else generator.state.numpy().tolist()]


def set_random_states(model: keras.Model, states: Sequence[list[int] | None]) -> None:
    """Restores generator `states`, unless they belong to another model."""
    variables = _generator_variables(model)
    if len(states) != len(variables) + 1:
        return
    for variable, value in zip(variables, states, strict=False):
        variable.assign(value)
    if states[-1] is not None:
        _generator_in(vars(_global_state.GLOBAL_STATE_TRACKER)).state.assign(states[-1])


def _generator_variables(model: keras.Model) -> list[keras.Variable]:
    weights = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


class NamedBuffer(io.BytesIO):
    """A buffer that Keras treats as a file with a name, which determines the format."""

    def __init__(self, name: Any, content: bytes = b"") -> None:
        super().__init__(content)
        self._name = str(name)

    def __str__(self) -> str:
        return self._name


class Backup(NamedTuple):
    """Paths and progress that Keras' `BackupAndRestore` keeps private.

    With `double_checkpoint`, the former paths have the second-to-last backup.
    """

    weights: str
    progress: str
    former_weights: str
    former_progress: str
    trained: dict[str, int]

    @classmethod
    def of(cls, callback: keras.callbacks.BackupAndRestore) -> Backup:
        """Returns the current paths and progress of a callback."""
        return cls(
            callback._weights_path,
            callback._training_metadata_path,
            callback._prev_weights_path,
            callback._prev_training_metadata_path,
            {"epoch": callback._current_epoch, "batch": callback._last_batch_seen},
        )


def backing_up(
    callback: keras.callbacks.BackupAndRestore, save: Callable[[], None], load: Callable[[], None]
) -> contextlib.AbstractContextManager[None]:
    """Within this context, `BackupAndRestore` saves and loads by other functions."""
    return with_methods(callback, _save_model=save, _load_model=load)


def swapping_by(
    callback: keras.callbacks.SwapEMAWeights, swap: Callable[..., None]
) -> contextlib.AbstractContextManager[None]:
    """Within this context, `swap(optimizer, swap_one, original)` finds averages for a callback.

    Keras does not look for averaged weights in a wrapper.
    """

    def apply(tf_fn: Callable[[Any], None], backend_fn: Any) -> None:
        stock = type(callback)._apply_to_ema_optimizers
        swap(callback.model.optimizer, tf_fn, lambda: stock(callback, tf_fn, backend_fn))

    return with_methods(callback, _apply_to_ema_optimizers=apply)


def start_at(model: keras.Model, epoch: int) -> None:
    """Lets `fit` continue at an epoch, which only Keras' own callback can do."""
    model._initial_epoch = epoch


def weights_in_hdf5(model: keras.Model) -> io.BytesIO:
    """Returns the bytes that `save_weights` writes; the public function takes only paths."""
    buffer = NamedBuffer("latest.weights.h5")
    _saving_lib.save_weights_only(model, buffer)
    return buffer


def load_hdf5(model: keras.Model, path: str) -> None:
    """Loads a file with the bytes of `weights_in_hdf5`; the public API restricts its name."""
    with open(path, "rb") as file:
        _saving_lib.load_weights_only(model, NamedBuffer("latest.weights.h5", file.read()))


def data_adapter(**data: Any) -> Any:
    """Keras' own reader of the data of `fit`, which tells the number of batches."""
    return _data_adapters.get_data_adapter(**data)


def batch_of_py_dataset(adapter: Any, index: int) -> Any:
    """Returns a batch of a `PyDataset` as Keras trains on it, with weights of classes."""
    return adapter._standardize_batch(adapter.py_dataset[index])


def is_of_arrays(adapter: Any) -> bool:
    """Whether a data adapter reads arrays."""
    return isinstance(adapter, _ArrayDataAdapter)


def split(arrays: Any, share: float) -> tuple[Any, Any]:
    """Divides arrays as `validation_split` does."""
    return _train_validation_split(arrays, validation_split=share)


def building_by(
    model: keras.Model, build: Callable[[Any], None]
) -> contextlib.AbstractContextManager[None]:
    """Within this context, `build(data adapter)` builds a model before Keras goes through data.

    Keras takes a batch from a separate iterator, under a strategy only, and asks the strategy for
    the mean of the workers' rows.
    """

    def build_by(iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is None:
            type(model)._maybe_symbolic_build(model, data_batch=data_batch)
        else:
            build(iterator.data_adapter)

    return with_methods(model, _maybe_symbolic_build=build_by)


def build_model(model: keras.Model, batch: Any) -> None:
    """Creates all variables of a model, its metrics and its optimizer, for data like a batch."""
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=batch)


def trace(function: Callable[..., Any], *args: Any) -> None:
    """Traces a function; layers that it calls create their variables."""
    _compute_output_spec(function, *args)


def decay_in_updates(optimizer: keras.optimizers.Optimizer) -> None:
    """Has Muon decay the weights of each replica without communication, as other optimizers do.

    Muon assigns decayed weights in a replica, where `assign` averages the weights of all workers.
    """
    if isinstance(optimizer, getattr(keras.optimizers, "Muon", ())):
        vars(optimizer)["_apply_weight_decay"] = functools.partial(_decay_in_updates, optimizer)


def _decay_in_updates(
    muon: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    original = type(muon)._apply_weight_decay
    if not (tf.distribute.has_strategy() and tf.distribute.get_replica_context()):
        original(muon, variables)
        return

    def decay(strategy: tf.distribute.Strategy) -> None:
        for variable in variables:
            update = functools.partial(original, muon, [variable])
            strategy.extended.update(variable.value, lambda _, f=update: f(), group=False)

    tf.__internal__.distribute.interim.maybe_merge_call(decay, tf.distribute.get_strategy())
