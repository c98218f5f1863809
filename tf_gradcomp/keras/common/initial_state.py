"""Gives all ranks of a Horovod job the initial model of rank 0."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.exchange.gradients import native
from tf_gradcomp.groups import bitcast
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.horovod_group import HorovodGroup
from tf_gradcomp.keras.common.compressed import Compressed
from tf_gradcomp.keras.common.wrappers import is_per_process, optimizers_of, wrappers_of
from tf_gradcomp.keras_version import keras, keras_private


def broadcast_initial_state(model: keras.Model) -> None:
    """Gives all ranks the weights and the inner optimizer's variables of rank 0; all must call it.

    Call this in your own training loop; in `fit`, use `gc.callbacks.BroadcastInitialState()`.
    Residuals and each rank's other own state stay unchanged. Under a strategy, which creates equal
    models, it does nothing.

    Args:
        model: Built. The model may be compiled with any optimizer, or with none.

    Raises:
        ValueError: If the model is not built, or Horovod is not initialized.
        WorkersDisagreeError: If ranks have other variables.
    """
    if not model.built or not model.weights:
        raise ValueError(
            f"broadcast_initial_state: {model.name!r} has no variables yet; build the model first, "
            "with an Input layer, or by a call on a batch."
        )
    group = ranks_of(model)
    if not isinstance(group, HorovodGroup):
        return
    optimizers = list(optimizers_of(model))
    if model.optimizer is not None:
        keras_private.build(model.optimizer, model.trainable_variables)
    state = [*model.weights, *itertools.chain.from_iterable(map(_state_of, optimizers))]
    # An optimizer around a wrapper may list the wrapper's variables among its own.
    shared = {
        id(v): native(v)
        for v in state
        if not any(is_per_process(v, optimizer) for optimizer in optimizers)
    }
    _take_first_values(group, list(shared.values()))


def _take_first_values(group: Group, variables: Sequence[tf.Variable]) -> None:
    """Gives variables the values of the first rank; refuses ranks with other variables."""
    forms = {f"variable {i}": f"{v.dtype.name} {v.shape}" for i, v in enumerate(variables)}
    group.processes.agree({"next action": "taking the values of the first rank", **forms})
    (communicator,) = group.all_replicas.communicators()
    communicator.label = "first"

    @tf.function(autograph=False)
    def take() -> None:
        for variable in variables:
            value = variable.read_value()
            bits = bitcast.encoded(value)
            first_bits = communicator.broadcast(tf.reshape(bits, [-1]), tf.constant(0))
            first_bits = tf.reshape(first_bits, tf.shape(bits))
            variable.assign(bitcast.decoded(first_bits, value.dtype))

    take()


def ranks_of(model: keras.Model) -> Group | None:
    """The ranks of Horovod that train a model; None under a strategy."""
    with model.distribute_strategy.scope():
        if tf.distribute.has_strategy():
            return None
    groups = [wrapper.group for wrapper in wrappers_of(model)]
    return groups[0] if groups else HorovodGroup()


def _state_of(optimizer: Any) -> Iterator[Any]:
    """Returns the variables of an optimizer and of its inner optimizers, except our wrapper's."""
    while optimizer is not None:
        inner = getattr(optimizer, "inner_optimizer", None)
        if inner is None or not isinstance(optimizer, Compressed):
            yield from keras_private.state_variables(optimizer)
        optimizer = inner
