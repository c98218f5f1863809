"""Replacements of Keras 2's functions under `gc.MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_gradcomp.groups.means import sums_over_replicas
from tf_gradcomp.keras.common import losses
from tf_gradcomp.keras.common import strategy as common
from tf_gradcomp.keras.common.compressed_all_reduce import with_missing
from tf_gradcomp.keras.common.precondition import check_moments_are_its_own
from tf_gradcomp.keras.keras2 import keras_private
from tf_gradcomp.strategy.strategy import CheckedStrategy

_MEAN = tf.VariableAggregation.MEAN
_IS_GLOBAL = "_gradcomp_is_global"  # an attribute of metric results that count all replicas


def reduce_in_optimizer(optimizer: Any, grads_and_vars: Any, original: Any) -> Any:
    """Replaces the reduction of gradients in Keras' optimizers, unless they are wrapped."""
    check_moments_are_its_own(optimizer)
    pairs = list(grads_and_vars)
    if not pairs or keras_private.reduces_by_itself(optimizer):
        return original(optimizer, pairs)
    gradients, variables = zip(*pairs, strict=True)
    losses.tell_of_wrong_share(gradients, means=False)
    ops = common.ops_for_gradients(optimizer, pairs, variables)
    if ops is None:
        return common.with_equal_lookups_summed(pairs, original(optimizer, pairs))
    # A loss scaler inspects the sums to find out whether a step must be skipped.
    if_skipped = math.nan if keras_private.looks_for_nans(optimizer) else 0.0
    totals = ops.reduction(gradients, variables, variables, if_skipped)()
    return list(zip(with_missing(gradients, totals), variables, strict=True))


def results_of_metrics(model: Any, original: Callable[[], Any]) -> Any:
    """Replaces the separate sums of metrics by one collective for all metrics."""
    strategy = tf.distribute.get_strategy()
    replica = tf.distribute.get_replica_context()
    if replica is None or not isinstance(strategy, CheckedStrategy):
        return original()

    def over_replicas(strategy: CheckedStrategy) -> Any:
        counted = [v for metric in model.metrics for v in metric.variables if _is_reduced(v)]
        reduced = [
            total / strategy.num_replicas_in_sync if variable.aggregation == _MEAN else total
            for variable, total in zip(counted, sums_over_replicas(strategy, counted), strict=True)
        ]
        with strategy.reusing(counted, reduced):
            return original()

    return replica.merge_call(over_replicas)


def mark_as_global(results: Any) -> None:
    """Marks the result of a metric as a result over all replicas."""
    for result in tf.nest.flatten(results):
        setattr(result, _IS_GLOBAL, True)


def sums_of_step(
    strategy: tf.distribute.Strategy, outputs: Any, original: Callable[[], Any]
) -> Any:
    """Replaces Keras' sums; metric results over all replicas stay unchanged."""
    if not isinstance(strategy, CheckedStrategy):
        return original()
    leaves = tf.nest.flatten(outputs)
    own = [strategy.experimental_local_results(leaf)[0] for leaf in leaves]
    others = [i for i, one in enumerate(own) if not hasattr(one, _IS_GLOBAL)]
    totals = sums_over_replicas(strategy, [leaves[i] for i in others])
    for i, total in zip(others, totals, strict=True):
        own[i] = total
    return tf.nest.pack_sequence_as(outputs, own)


def _is_reduced(variable: Any) -> bool:
    """Returns whether reading a variable sums or averages the replicas' own values."""
    return (
        isinstance(variable, tf.distribute.DistributedValues)
        and variable.synchronization == tf.VariableSynchronization.ON_READ
        and variable.aggregation in (tf.VariableAggregation.SUM, _MEAN)
    )
