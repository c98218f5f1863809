"""Training with Keras 2 on several workers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_gradcomp.groups.means import sums_over_replicas
from tf_gradcomp.keras.common import (
    fit,  # noqa: F401  # replaces `fit`
    summing,
)
from tf_gradcomp.keras.common.data import check_batches
from tf_gradcomp.keras.common.second_moments import check_moments_not_taken
from tf_gradcomp.private import keras2 as keras_private
from tf_gradcomp.private.patching import patch
from tf_gradcomp.strategy.compressed_all_reduce import with_missing
from tf_gradcomp.strategy.strategy import MultiWorkerMirroredStrategy

_MEAN = tf.VariableAggregation.MEAN
_IS_GLOBAL = "_gradcomp_is_global"  # an attribute of metric results that count all replicas


@tf.autograph.experimental.do_not_convert
def reduce_gradients(original: Any, self: Any, grads_and_vars: Any) -> Any:
    """Replaces the reduction of gradients in Keras' optimizers, unless they are wrapped."""
    check_moments_not_taken(self)
    pairs = list(grads_and_vars)
    if not pairs or keras_private.reduces_by_itself(self):
        return original(self, pairs)
    gradients, variables = zip(*pairs, strict=True)
    summing.warn_if_loss_scaling_wrong(means=False)
    ops = summing.ops_for_gradients(self, pairs, variables)
    if ops is None:
        return summing.with_equal_lookups_summed(pairs, original(self, pairs))
    # A loss scaler inspects the sums to find out whether a step must be skipped.
    if_skipped = math.nan if keras_private.looks_for_nans(self) else 0.0
    totals = ops.reduction(gradients, variables, variables, if_skipped)()
    return list(zip(with_missing(gradients, totals), variables, strict=True))


for _target in keras_private.REDUCE_GRADIENTS:
    patch(
        _target,
        why="Only this function knows which tensor is the gradient of which variable.",
        test="test_reduce_gradients",
        essential=True,
    )(reduce_gradients)


@patch(
    "tensorflow.keras.Model.get_metrics_result",
    why="Each metric sums each of its variables with a separate collective.",
    test="test_results_of_metrics",
    essential=True,
)
@tf.autograph.experimental.do_not_convert
def results_of_metrics(original: Any, self: Any) -> Any:
    """Replaces the separate sums of metrics by one collective for all metrics."""
    strategy = tf.distribute.get_strategy()
    replica = tf.distribute.get_replica_context()
    if replica is None or not isinstance(strategy, MultiWorkerMirroredStrategy):
        return original(self)

    def over_replicas(strategy: MultiWorkerMirroredStrategy) -> Any:
        counted = [v for metric in self.metrics for v in metric.variables if _is_reduced(v)]
        reduced = [
            total / strategy.num_replicas_in_sync if variable.aggregation == _MEAN else total
            for variable, total in zip(counted, sums_over_replicas(strategy, counted), strict=True)
        ]
        with strategy.reusing(counted, reduced):
            return original(self)

    return replica.merge_call(over_replicas)


@patch(
    keras_private.RESULT_OF_METRIC,
    why="No public API distinguishes counts over all replicas from counts of one replica.",
    test="test_mark_results",
    essential=True,
)
def mark_results(original: Any, result_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks each result of a metric as a result over all replicas."""
    keras_result = original(result_fn)

    def marked(*args: Any) -> Any:
        results = keras_result(*args)
        for result in tf.nest.flatten(results):
            setattr(result, _IS_GLOBAL, True)
        return results

    return tf.__internal__.decorator.make_decorator(keras_result, marked)


@patch(
    keras_private.REDUCE_OUTPUTS,
    why="Keras multiplies the metrics of all workers by the number of workers.",
    test="test_reduce_outputs",
    essential=True,
)
def reduce_outputs(original: Any, values: Any, strategy: Any, reduction: str) -> Any:
    """Replaces Keras' sums; metric results over all replicas stay unchanged."""
    if reduction not in ("auto", "sum") or not isinstance(strategy, MultiWorkerMirroredStrategy):
        return original(values, strategy, reduction)
    leaves = tf.nest.flatten(values)
    local = [strategy.experimental_local_results(leaf)[0] for leaf in leaves]
    others = [i for i, result in enumerate(local) if not hasattr(result, _IS_GLOBAL)]
    totals = sums_over_replicas(strategy, [leaves[i] for i in others])
    for i, total in zip(others, totals, strict=True):
        local[i] = total
    return tf.nest.pack_sequence_as(values, local)


@patch(
    keras_private.HANDLE_DATA,
    why="Workers with different numbers of batches hang; no public API tells the number.",
    test="test_handle_data",
)
def handle_data(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Checks the number of batches where `fit`, `evaluate` or `predict` takes its data."""
    original(self, *args, **kwargs)
    if kwargs.get("distribute", True):
        check_batches(tf.distribute.get_strategy(), self.inferred_steps)


def reading(_model: Any, _given: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Does nothing: Keras 2 reads as it should."""
    return contextlib.nullcontext()


def _is_reduced(variable: Any) -> bool:
    """Whether reading a variable sums or averages the replicas' own values."""
    return (
        isinstance(variable, tf.distribute.DistributedValues)
        and variable.synchronization == tf.VariableSynchronization.ON_READ
        and variable.aggregation in (tf.VariableAggregation.SUM, _MEAN)
    )
