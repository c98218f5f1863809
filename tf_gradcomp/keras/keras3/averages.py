"""Averages of weights that wrapped optimizers keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gradcomp.keras.common.wrappers import compressed_in
from tf_gradcomp.private import keras3 as keras_private


def overwrite_if_due(
    strategy: tf.distribute.Strategy,
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    updates: Any,
    otherwise: Callable[[], None] = lambda: None,
) -> None:
    """Overwrites weights and applies their constraints, if this is due after `updates`."""
    if not (optimizer.use_ema and optimizer.ema_overwrite_frequency):
        otherwise()
        return

    def overwrite() -> None:
        keras_private.overwrite_by_averages(optimizer)
        strategy.extended.call_for_each_replica(constrain, args=(variables,))

    due = tf.equal(tf.cast(updates, tf.int64) % optimizer.ema_overwrite_frequency, 0)
    tf.cond(due, overwrite, otherwise)


def constrain(variables: Sequence[keras.Variable]) -> None:
    """Applies the constraints of variables."""
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))


def _averaging(optimizer: Any) -> Iterator[Any]:
    """The optimizers, at any depth, that keep averages of weights."""
    inside = getattr(optimizer, "inner_optimizer", None)
    within = [inside] if inside is not None else getattr(optimizer, "optimizers", None)
    if within is not None:
        for one in within:
            yield from _averaging(one)
    elif optimizer.use_ema:
        yield optimizer


def swap_averages(
    optimizer: Any, swap: Callable[[Any], None], original: Callable[[], None]
) -> None:
    """Replaces Keras' search for averages, which finds none in a wrapper inside another object."""
    averaging = list(_averaging(optimizer))
    if not averaging or not any(compressed_in(optimizer)):
        original()
        return
    for one in averaging:
        swap(one)
