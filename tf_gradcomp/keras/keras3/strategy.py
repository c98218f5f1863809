"""The hooks by which Keras 3 works under `gc.MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_gradcomp import tf_private
from tf_gradcomp.exchange.gradients import check_variables_in_scope
from tf_gradcomp.groups.means import means_over_replicas
from tf_gradcomp.keras.common import checks, losses
from tf_gradcomp.keras.common.reading import GeneratorReader, PyDatasetReader
from tf_gradcomp.keras.common.same_data import (
    check_last_batch,
    compared_batch,
    tell_of_empty_batch,
)
from tf_gradcomp.keras.common.strategy import (
    MultiWorkerMirroredStrategy,
    check_batches,
    order_of_first,
)
from tf_gradcomp.keras.keras3 import keras_private
from tf_gradcomp.keras.keras3 import loss_scale as _loss_scale  # noqa: F401 (has all agree on overflows)
from tf_gradcomp.keras.keras3 import saving as _saving  # noqa: F401 (has workers save together)
from tf_gradcomp.strategy.cross_device_ops import CompressedAllReduce, reduce_gradients
from tf_gradcomp.strategy.strategy import CheckedStrategy

__all__ = ["MultiWorkerMirroredStrategy"]


def _reduce_in_optimizer(optimizer: Any, grads_and_vars: Any, original: Callable[..., Any]) -> Any:
    """Stands in for the reduction of Keras' optimizers: our strategy checks, and may compress."""
    strategy = tf.distribute.get_strategy()
    ops = tf_private.cross_device_ops(strategy)
    trained = keras_private.optimizer_variables(optimizer)
    losses.tell_of_wrong_share(means=False)
    if isinstance(strategy, CheckedStrategy):
        check_variables_in_scope(strategy, trained)
        checks.check_no_overwriting(trained, strategy.num_replicas_in_sync)
    grads_and_vars = list(grads_and_vars)
    if not isinstance(ops, CompressedAllReduce) or not grads_and_vars:
        if isinstance(strategy, CheckedStrategy) and grads_and_vars:
            strategy.check_gradients(*zip(*grads_and_vars, strict=True))
        return original(grads_and_vars)
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            "Keras cannot accumulate gradients under a strategy; use gc.CompressedOptimizer, which "
            "can, and leave the strategy without a compressor."
        )
    gradients, variables = zip(*grads_and_vars, strict=True)
    exchange = ops.gradient_exchange(trained)
    replicas = exchange.group.size
    checks.check_keeps_zeros(optimizer, exchange.compressor, exchange.specs, replicas)
    reduced = reduce_gradients(ops, gradients, variables, trained=trained)
    return list(zip(reduced, variables, strict=True))


def _means_of_step(
    strategy: tf.distribute.Strategy, outputs: Any, original: Callable[[], Any]
) -> Any:
    if not isinstance(strategy, CheckedStrategy) or strategy.num_replicas_in_sync == 1:
        return original()
    return means_over_replicas(strategy, outputs)


def _check_metrics(model: keras.Model) -> None:
    strategy = model.distribute_strategy
    if isinstance(strategy, CheckedStrategy) and strategy.num_replicas_in_sync > 1:
        checks.check_metrics_created_in_scope(strategy, model.metrics)


def _may_be_empty(inputs: tf.Tensor) -> tf.Tensor | None:
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, CheckedStrategy) or strategy.num_replicas_in_sync == 1:
        return None
    if inputs.shape[0]:
        return None
    is_empty = tf.equal(tf.shape(inputs)[0], 0)
    tell_of_empty_batch(is_empty)
    return is_empty


def _reader_of(
    strategy: tf.distribute.Strategy, dataset: keras.utils.PyDataset, shuffle: bool
) -> PyDatasetReader | None:
    if tf_private.cross_device_ops(strategy) is None:
        return None  # no strategy, or none that reads ahead
    return PyDatasetReader(
        dataset, functools.partial(order_of_first, strategy) if shuffle else None
    )


keras_private.read_generators(GeneratorReader)
keras_private.read_py_datasets(_reader_of)
keras_private.on_batch_to_build_with(compared_batch)
keras_private.on_arrays(check_last_batch)
keras_private.keep_statistics_of_empty_batches(_may_be_empty)
keras_private.on_built(_check_metrics)
keras_private.on_data(check_batches)
keras_private.on_reduce_gradients(_reduce_in_optimizer)
keras_private.on_means_of_steps(_means_of_step)
