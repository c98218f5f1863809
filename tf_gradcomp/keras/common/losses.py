"""Warns users if Keras divides a loss by the number of replicas twice, or never."""

from __future__ import annotations

import tensorflow as tf

from tf_gradcomp.groups.messages import log_info

_noted: dict[str, tuple[tf.Graph, bool]] = {}  # the graph in which a loss was traced, and `divided`


def note(*, divided: bool) -> None:
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
