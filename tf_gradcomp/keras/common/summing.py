"""How gradients of optimizers without a wrapper are summed, and how losses are divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.exchange.gradients import check_variables_in_scope, path_of
from tf_gradcomp.groups.messages import log_info
from tf_gradcomp.groups.slices import sum_of_concatenated
from tf_gradcomp.keras.common.inner import warn_of_lost_zeros
from tf_gradcomp.private import tensorflow as tf_private
from tf_gradcomp.strategy.compressed_all_reduce import CompressedAllReduce, compressed_all_reduce
from tf_gradcomp.strategy.strategy import MultiWorkerMirroredStrategy

_noted: dict[str, tuple[tf.Graph, bool]] = {}  # the graph in which a loss was traced, and `divided`


def note_loss_division(*, divided: bool) -> None:
    """Records, while a step is traced, whether Keras divides its loss by the number of replicas."""
    _noted["latest"] = (tf.compat.v1.get_default_graph(), divided)


def warn_if_loss_scaling_wrong(*, means: bool) -> None:
    """Warns the user if a loss of this step is divided twice or never."""
    graph, divided = _noted.pop("latest", (None, means))
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas == 1 or graph is not tf.compat.v1.get_default_graph() or divided != means:
        return
    if means:
        log_info(
            f"Keras divides a loss by the number of replicas, {replicas}, and "
            'CompressedOptimizer(reduction="mean") divides its gradients a second time: they are '
            f'{replicas} times too small. Leave reduction="mean" out, or give Keras a loss that it '
            "does not divide."
        )
    else:
        log_info(
            "A loss function returns one number for a whole batch, which Keras 3 does not divide "
            f"by the number of replicas: its gradients are {replicas} times as large as in one "
            "process. Return a value for each row, such as keras.ops.mean(..., axis=-1); or take "
            "means, by "
            'gc.CompressedOptimizer(..., reduction="mean").'
        )


def ops_for_gradients(
    optimizer: Any, pairs: Sequence[tuple[Any, Any]], trained: Sequence[Any]
) -> CompressedAllReduce | None:
    """Returns the ops that compress the gradients of an optimizer that is not wrapped, if any.

    Checks the gradients of `pairs` and the `trained` variables of the optimizer.
    """
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, MultiWorkerMirroredStrategy):
        check_variables_in_scope(strategy, trained)
    ops = compressed_all_reduce(strategy)
    if ops is None:
        check_gradients(strategy, *zip(*pairs, strict=True))
        return None
    exchange = ops.gradient_exchange(trained)
    if exchange.group.size > 1:
        warn_of_lost_zeros(optimizer, [exchange.compressor])
    return ops


def check_gradients(
    strategy: tf.distribute.Strategy, gradients: Sequence[Any], variables: Sequence[Any]
) -> None:
    """Checks, while a step is traced, that all workers have gradients for the same variables."""
    if isinstance(strategy, MultiWorkerMirroredStrategy):
        present = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        paths = [path_of(variable) for _, variable in present]
        strategy.gradient_agreement.check(paths, [gradient for gradient, _ in present])


def with_equal_lookups_summed(pairs: Sequence[tuple[Any, Any]], reduced: Any) -> Any:
    """Returns what TensorFlow has reduced; TensorFlow only concatenates slices."""
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    if (
        not isinstance(strategy, MultiWorkerMirroredStrategy)
        or replicas == 1
        or tf_private.in_xla()
    ):
        return reduced
    return [
        (sum_of_concatenated(total, replicas, local), variable)
        if isinstance(total, tf.IndexedSlices)
        else (total, variable)
        for (local, _), (total, variable) in zip(pairs, reduced, strict=True)
    ]
