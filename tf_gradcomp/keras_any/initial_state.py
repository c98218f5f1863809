"""Gives all ranks of a Horovod job the model that rank 0 begins with."""

from __future__ import annotations

import tensorflow as tf

from tf_gradcomp.distribute.gradients import native
from tf_gradcomp.distribute.horovod_group import HorovodGroup
from tf_gradcomp.keras_here import door, keras
from tf_gradcomp.wrapper.compressed import compressed_in, compressed_optimizer, is_apart

keras_private = door("keras_private")


def broadcast_initial_state(model: keras.Model) -> None:
    """Gives all ranks the weights and the inner optimizer's variables of rank 0; all must call it.

    For training loops; in `fit`, `gc.callbacks.BroadcastInitialState()` does it. Residuals, and
    what else each rank has for itself, stay as they are. Under a strategy, which creates equal
    models, it does nothing.

    Args:
        model: Built. It may be compiled with any optimizer, or with none.

    Raises:
        ValueError: If the model is not built, or Horovod is not initialized.
        WorkersDisagreeError: If ranks have other variables.
    """
    if not model.built:
        raise ValueError(
            f"broadcast_initial_state: {model.name!r} has no variables yet; build the model first, "
            "with an Input layer, model.build(input_shape), or a call on a batch."
        )
    with model.distribute_strategy.scope():
        if tf.distribute.has_strategy():
            return
    compressed = compressed_optimizer(model)
    groups = [one.group for one in compressed_in(model.optimizer)]
    group = groups[0] if groups else HorovodGroup()
    optimizer = model.optimizer
    if optimizer is not None:
        keras_private.build(optimizer, model.trainable_variables)
    state = model.weights
    while optimizer is not None:
        inner = getattr(optimizer, "inner_optimizer", None)
        if inner is None or optimizer is not compressed:
            state += keras_private.own_variables(optimizer)
        optimizer = inner
    # What is around a wrapper may have the wrapper's variables among its own.
    shared = {id(v): native(v) for v in state if not is_apart(v, model.optimizer)}
    group.take_from_first(list(shared.values()))
