"""What `fit`, `evaluate` and `predict` read under `gc.MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_gradcomp.exchange.gradients import native, path_of
from tf_gradcomp.groups.agreement import WorkersDisagreeError
from tf_gradcomp.keras.common.data import (
    GeneratorReader,
    PyDatasetReader,
    check_batches,
    check_last_batch,
    compared_batch,
    order_of_first,
)
from tf_gradcomp.keras.keras3.steps import check_no_scaler_inside
from tf_gradcomp.private import keras3 as keras_private
from tf_gradcomp.private import tensorflow as tf_private
from tf_gradcomp.private.patching import with_methods
from tf_gradcomp.strategy import random_numbers, shuffles
from tf_gradcomp.strategy.strategy import MultiWorkerMirroredStrategy


class Reading:
    """The data of one call of `fit`, `evaluate` or `predict`.

    Attributes:
        data: By kind: `"train"` and `"test"`, which is for validation and prediction, too.
    """

    def __init__(self) -> None:
        self.data: dict[str, WorkersData] = {}

    def begin_steps(self, kind: str, model: keras.Model) -> None:
        """Records that the steps of one execution begin."""
        if kind in self.data:
            self.data[kind].count(model.steps_per_execution)


@contextlib.contextmanager
def reading(model: keras.Model, given: dict[str, Any]) -> Iterator[Reading | None]:
    """Replaces the data among the arguments of a call of `fit`, `evaluate` or `predict`.

    Within this context, the model is built from one batch of the data.
    """
    check_no_scaler_inside(getattr(model, "optimizer", None))  # a model need not be compiled
    if not isinstance(model.distribute_strategy, MultiWorkerMirroredStrategy):
        yield None
        return
    found = Reading()
    with keras_private.building_by(model, lambda data: data.build(model)):
        if not isinstance(given["x"], WorkersData):  # else `fit` evaluates
            found.data = _prepare(model, given)
        yield found


def _prepare(model: keras.Model, given: dict[str, Any]) -> dict[str, WorkersData]:
    arrays = tuple(given.get(name) for name in ("x", "y", "sample_weight"))
    validation = given.get("validation_data")
    if given.get("validation_split") and validation is None:
        arrays, validation = keras_private.split(arrays, given["validation_split"])
        given["validation_split"] = 0.0
    strategy = model.distribute_strategy
    trains = "steps_per_epoch" in given
    data = WorkersData(
        strategy,
        arrays,
        trains=trains,
        batch_size=given["batch_size"],
        steps_per_epoch=given["steps_per_epoch"] if trains else given["steps"],
        shuffle=given.get("shuffle", False),
        class_weight=given.get("class_weight"),
    )
    given["x"] = data
    for name in ("y", "sample_weight", "class_weight"):
        if name in given:
            given[name] = None
    if not trains:
        return {"test": data}
    if validation is None:
        return {"train": data}
    given["validation_data"] = WorkersData(
        strategy,
        keras.utils.unpack_x_y_sample_weight(validation),
        batch_size=given["validation_batch_size"] or given["batch_size"],
        steps_per_epoch=given["validation_steps"],
    )
    return {"train": data, "test": given["validation_data"]}


class WorkersData(keras_private.DataAdapter):
    """Data that workers read alike, in place of Keras' own adapter of the data.

    Args:
        strategy: The strategy.
        arrays: The `x`, `y` and `sample_weight` of Keras.
        trains: Whether `fit` trains on the data.
        **settings: The other settings of Keras.
    """

    def __init__(
        self,
        strategy: MultiWorkerMirroredStrategy,
        arrays: Any,
        *,
        trains: bool = False,
        **settings: Any,
    ) -> None:
        x, y, sample_weight = arrays
        self._strategy = strategy
        self._steps = settings["steps_per_epoch"]
        self._shuffle, self._trains = settings.get("shuffle", False), trains
        self._begin_epoch: Callable[[], None] = lambda: None
        generator = GeneratorReader(x) if isinstance(x, types.GeneratorType) else None
        self._adapter = keras_private.data_adapter(
            x=x if generator is None else (batch for batch in generator),
            y=y,
            sample_weight=sample_weight,
            **settings,
        )
        if generator is not None:
            self._adapter.generator = generator.read
        self._generator = generator
        self._is_py_dataset = isinstance(x, keras.utils.PyDataset)
        if self._is_py_dataset:
            shuffles = settings.get("shuffle")
            order = functools.partial(order_of_first, strategy) if shuffles else None
            reader = self._adapter.enqueuer = PyDatasetReader(x, order)
            self._begin_epoch = reader.begin_epoch
        self._distributed: _Distributed | None = None
        self._is_built = False

    @property
    def num_batches(self) -> int | None:
        """The number of batches, if known."""
        return self._adapter.num_batches

    @property
    def batch_size(self) -> int | None:
        """The number of rows in a batch of all workers, if known."""
        return self._adapter.batch_size

    def get_tf_dataset(self) -> _Distributed:
        """Returns the distributed data, which all workers have for as many steps."""
        if self._distributed is None:
            check_batches(self._strategy, self._steps or self.num_batches)
            order = None
            with contextlib.ExitStack() as stack:
                if keras_private.is_of_arrays(self._adapter):
                    size, last = self._adapter.batch_size, self._adapter.partial_batch_size
                    check_last_batch(self._strategy, last or size)
                    if self._shuffle:
                        rows = self._adapter.num_batches * size - (size - last if last else 0)
                        within = size if self._shuffle == "batch" else rows
                        order = shuffles.EpochOrder(rows, within)
                        stack.enter_context(order.replacing_shuffle())
                dataset = self._adapter.get_tf_dataset()
            if not isinstance(dataset, tf.distribute.DistributedDataset):
                dataset = self._strategy.experimental_distribute_dataset(dataset)
            reuses = self._generator is None and not self._is_py_dataset
            self._distributed = _Distributed(dataset, self._generator, order, reuses=reuses)
        return self._distributed

    def on_epoch_begin(self) -> None:
        """Called by Keras before each epoch."""
        self._adapter.on_epoch_begin()
        self._begin_epoch()

    def on_epoch_end(self) -> None:
        """Called by Keras after each epoch, and before the first."""
        self._adapter.on_epoch_end()

    def count(self, steps: int) -> None:
        """Counts steps that begin with batches of the newest iterator."""
        if self._distributed is not None:
            self._distributed.count(steps)

    def build(self, model: keras.Model) -> None:
        """Builds a model, its metrics and its optimizer, and checks that workers read alike."""
        if not self._is_built:
            batch = self._first_batch()
            if batch is None:
                raise ValueError("The data have no batch.")
            build(model, batch)
        self._is_built = True

    def _first_batch(self) -> Any:
        """Returns rows as a replica gets them."""
        if self._generator is not None:
            return self._generator.first_batch
        if self._is_py_dataset:
            return keras_private.batch_of_py_dataset(self._adapter, 0)
        distributed = self.get_tf_dataset().source
        with random_numbers.keeping_states_of_data():
            batch = compared_batch(self._strategy, distributed, trains=self._trains)
            if batch is not None:
                return batch
            local = next(iter(distributed), None)
            return tf.nest.map_structure(
                lambda part: self._strategy.experimental_local_results(part)[0], local
            )


class _Distributed(tf.distribute.DistributedDataset):
    """Distributed data of Keras' `fit`, `evaluate` and `predict`.

    Keras drops iterators that it has not used, and iterators read ahead at once: their functions
    would draw random numbers. An unused iterator is therefore used instead of a new one.

    Args:
        source: The distributed data.
        generator: Is told of new iterators and of steps; None for other data than generators.
        order: Is told of new iterators; None if no rows of arrays are shuffled.
        reuses: Whether an unused iterator is used instead of a new one.
    """

    def __init__(
        self,
        source: Any,
        generator: GeneratorReader | None,
        order: shuffles.EpochOrder | None,
        *,
        reuses: bool,
    ) -> None:
        self.source = source
        self._order = order
        self._generator = generator
        self._reuses = reuses
        self._iterator: Any = None
        self._used = 0  # batches of the newest iterator

    def __iter__(self) -> Iterator[Any]:
        if self._iterator is None or self._used or not self._reuses:
            if self._generator is not None:
                self._generator.new_iterator()
            if self._order is not None:
                self._order.begin_epoch()
            self._iterator, self._used = iter(self.source), 0
            tf_private.end_in_background(self._iterator)
        return self._iterator

    @property
    def element_spec(self) -> Any:
        """The type of a batch."""
        return self.source.element_spec

    def count(self, steps: int) -> None:
        """Counts steps that begin with batches of the newest iterator."""
        self._used += steps
        if self._generator is not None:
            self._generator.use(self._used)


def build(model: keras.Model, batch: Any) -> None:
    """Builds a model, and refuses metrics that were created outside the scope of our strategy."""
    strategy = model.distribute_strategy
    try:
        keras_private.build_model(model, batch)
    except Exception as error:
        if isinstance(error, WorkersDisagreeError) or not build_by_step(model, batch):
            raise
    if strategy.num_replicas_in_sync == 1:
        return
    for variable in (v for metric in model.metrics for v in metric.variables):
        if not strategy.extended.variable_created_in_scope(native(variable)):
            raise ValueError(
                f"{path_of(variable)!r} of a metric was created outside the strategy's "
                "scope, so each worker would have its own copy; create metrics, and call "
                "model.compile, inside `with strategy.scope():`."
            )


def build_by_step(model: keras.Model, batch: Any) -> bool:
    """Builds a model and its optimizers by tracing its own `train_step` or `test_step`.

    Variables cannot be created when replicas run a step. Returns False if all steps are Keras' own.
    """
    names = ("train_step", "test_step")
    custom_steps = [
        name for name in names if getattr(type(model), name) != getattr(keras.Model, name)
    ]
    if not custom_steps:
        return False
    trained: list[tuple[Any, list[Any]]] = []

    def recording(optimizer: Any) -> dict[str, Callable[..., None]]:
        def apply(grads: Any, trainable_variables: Any = None) -> None:
            trained.append((optimizer, list(trainable_variables or ())))

        def apply_gradients(grads_and_vars: Any) -> None:
            trained.append((optimizer, [variable for _, variable in grads_and_vars]))

        return {"apply": apply, "apply_gradients": apply_gradients}

    with contextlib.ExitStack() as stack:
        stack.enter_context(model.distribute_strategy.scope())
        for optimizer in _optimizers_in(vars(model).values()):
            stack.enter_context(with_methods(optimizer, **recording(optimizer)))
        for name in (
            custom_steps * 2
        ):  # without variables, the first trace may end before the optimizer
            try:
                keras_private.trace(getattr(model, name), batch)
            except WorkersDisagreeError:
                raise
            except Exception:  # raised again where replicas run the step
                continue
        for optimizer, variables in trained:
            if variables and not optimizer.built:
                optimizer.build(variables)
    return True


def _optimizers_in(values: Iterable[Any]) -> Iterator[keras.optimizers.Optimizer]:
    for value in values:
        if isinstance(value, keras.optimizers.Optimizer):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _optimizers_in(value)
        elif isinstance(value, dict):
            yield from _optimizers_in(value.values())
