"""Replacements of Keras 3's functions under `gc.MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_gradcomp import tf_private
from tf_gradcomp.exchange.gradients import (
    check_no_overwriting,
    native,
    path_of,
)
from tf_gradcomp.groups.agreement import WorkersDisagreeError
from tf_gradcomp.groups.means import means_over_replicas
from tf_gradcomp.groups.notices import reading_own
from tf_gradcomp.keras.common import losses
from tf_gradcomp.keras.common import strategy as common
from tf_gradcomp.keras.common.compressed_all_reduce import compressed_all_reduce, with_missing
from tf_gradcomp.keras.common.hooks import with_methods
from tf_gradcomp.keras.common.inner import check_not_inside
from tf_gradcomp.keras.common.precondition import check_moments_are_its_own
from tf_gradcomp.keras.common.reading import PyDatasetReader
from tf_gradcomp.keras.common.same_data import tell_of_empty_batch
from tf_gradcomp.keras.keras3 import keras_private
from tf_gradcomp.strategy import random_numbers
from tf_gradcomp.strategy.strategy import CheckedStrategy


def reduce_in_optimizer(optimizer: Any, grads_and_vars: Any, original: Callable[..., Any]) -> Any:
    """Replaces the reduction of gradients in Keras' optimizers; wrapped ones do not reduce."""
    check_not_inside(optimizer, keras_private.applying())
    check_moments_are_its_own(optimizer)
    strategy = tf.distribute.get_strategy()
    trained = keras_private.optimizer_variables(optimizer)
    if isinstance(strategy, CheckedStrategy):
        check_no_overwriting(trained, strategy.num_replicas_in_sync)
    pairs = list(grads_and_vars)
    losses.tell_of_wrong_share([gradient for gradient, _ in pairs], means=False)
    if not pairs:
        return original(optimizer, pairs)
    if compressed_all_reduce(strategy) is not None and optimizer.gradient_accumulation_steps:
        raise ValueError(
            "Keras cannot accumulate gradients under a strategy; use gc.CompressedOptimizer, "
            "which can, and set no compressor on the strategy."
        )
    ops = common.ops_for_gradients(optimizer, pairs, trained)
    if ops is None:
        return common.with_equal_lookups_summed(pairs, original(optimizer, pairs))
    gradients, variables = zip(*pairs, strict=True)
    totals = ops.reduction(gradients, variables, trained)()
    return list(zip(with_missing(gradients, totals), variables, strict=True))


def means_of_step(
    strategy: tf.distribute.Strategy, outputs: Any, original: Callable[[], Any]
) -> Any:
    """Returns the means over the replicas of a `fit` step's results.

    With local steps, the means belong to the latest step with an exchange, because a collective in
    each step would make workers wait for each other in each step.
    """
    if not isinstance(strategy, CheckedStrategy) or strategy.num_replicas_in_sync == 1:
        return original()
    return means_over_replicas(strategy, outputs, strategy.rare_exchanges)


@contextlib.contextmanager
def building(model: keras.Model) -> Iterator[None]:
    """Within this context, Keras learns the shapes of a model from this worker's part of a batch.

    Keras alone asks for the mean over the replicas. Integers and strings have none, and workers'
    batches may differ in size. At the end, metrics that were created outside the scope of our
    strategy are refused.
    """
    strategy = model.distribute_strategy
    with reading_own(strategy), random_numbers.keeping_states_of_data():
        yield
    if isinstance(strategy, CheckedStrategy) and strategy.num_replicas_in_sync > 1:
        for variable in (v for metric in model.metrics for v in metric.variables):
            if not strategy.extended.variable_created_in_scope(native(variable)):
                raise ValueError(
                    f"{path_of(variable)!r} of a metric was created outside the strategy's "
                    "scope, so each worker would have its own copy; create metrics, and call "
                    "model.compile, inside `with strategy.scope():`."
                )


def build_by_step(
    model: keras.Model, batch: Any, error: Exception, trace: Callable[..., Any]
) -> bool:
    """Builds a model and its optimizers by tracing its own `train_step` or `test_step`.

    Variables cannot be created when replicas run a step. Returns False if all steps are Keras' own.
    """
    names = ("train_step", "test_step")
    own = [name for name in names if getattr(type(model), name) != getattr(keras.Model, name)]
    if isinstance(error, WorkersDisagreeError) or not own:
        return False
    trained: list[tuple[Any, list[Any]]] = []

    def recording(optimizer: Any) -> dict[str, Callable[..., None]]:
        def apply(grads: Any, trainable_variables: Any = None) -> None:
            trained.append((optimizer, list(trainable_variables or ())))

        def apply_gradients(grads_and_vars: Any) -> None:
            trained.append((optimizer, [variable for _, variable in grads_and_vars]))

        return {"apply": apply, "apply_gradients": apply_gradients}

    with contextlib.ExitStack() as stack:
        for optimizer in _optimizers_in(vars(model).values()):
            stack.enter_context(with_methods(optimizer, **recording(optimizer)))
        for name in own * 2:  # without variables, the first trace may end before the optimizer
            try:
                trace(getattr(model, name), batch)
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


def may_be_empty(inputs: tf.Tensor) -> tf.Tensor | None:
    """Returns whether a batch is empty, as a tensor; None if it cannot be empty."""
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, CheckedStrategy) or strategy.num_replicas_in_sync == 1:
        return None
    if inputs.shape[0]:
        return None
    is_empty = tf.equal(tf.shape(inputs)[0], 0)
    tell_of_empty_batch(is_empty)
    return is_empty


def reader_of(
    strategy: tf.distribute.Strategy, dataset: keras.utils.PyDataset, shuffle: bool
) -> PyDatasetReader | None:
    """Returns the reader of a `PyDataset` for a strategy; None if Keras reads it by itself."""
    if tf_private.cross_device_ops(strategy) is None:
        return None  # no strategy, or a strategy that does not read ahead
    return PyDatasetReader(
        dataset, functools.partial(common.order_of_first, strategy) if shuffle else None
    )
