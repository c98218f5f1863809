"""Connects Keras 2's Adam, AdamW and Nadam, and two of tensorflow-addons, with our `adam`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.adam import preconditioner
from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.keras_version import keras
from tf_gradcomp.private import keras2 as keras_private


def possible_preconditioner(optimizer: Any) -> Preconditioner | None:
    """Returns the preconditioner that an optimizer allows; None if it has no second moment.

    If the optimizer wraps another optimizer, as `MovingAverage` does, the wrapped one decides.
    """
    core = updating(optimizer)
    if type(core) not in allowed():
        return None
    with tf.init_scope():  # a config reads variables; reading other settings creates variables
        config = core.get_config()
    return Preconditioner(
        float(config["beta_2"]),
        float(config["epsilon"]),
        amsgrad=bool(config.get("amsgrad", False)),
        corrects_epsilon=not isinstance(core, (*_nadams(), *_addons_optimizers("LAMB"))),
    )


def momentum_only(
    optimizer: Any, divided: Sequence[Any], delayed: Sequence[tf.Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Within this context, an optimizer treats gradients as already divided and clipped.

    Gradients of `divided` weights that are `delayed` bypass the momentum.
    """
    steps = [functools.partial(_update, delayed=is_delayed) for is_delayed in delayed]
    steps_by_variable = zip(divided, steps, strict=True)
    core = updating(optimizer)
    if isinstance(core, keras.optimizers.Nadam):
        step = tf.cast(core.iterations + 1, tf.float32)
        keras_private.set_nadam_product(core, preconditioner.nadam_product(core.beta_1, step))
    return keras_private.stepping(optimizer, core, steps_by_variable)


def updating(optimizer: Any) -> Any:
    """Returns the optimizer that updates, at any depth inside others."""
    *_, core = keras_private.within(optimizer)
    return core


def allowed() -> tuple[type, ...]:
    """Returns the classes of optimizers that can be preconditioned."""
    adams = (keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.legacy.Adam)
    return (*adams, *_nadams(), *_addons_optimizers("AdamW"), *_addons_optimizers("LAMB"))


def _nadams() -> tuple[type, ...]:
    return (keras.optimizers.Nadam, keras.optimizers.legacy.Nadam)


def _addons_optimizers(name: str) -> tuple[type, ...]:
    classes = keras_private.optimizers_of_addons()
    return (classes[name],) if name in classes else ()


def _update(optimizer: Any, gradient: Any, variable: Any, rate: Any, delayed: tf.Tensor) -> None:
    weights = tf.convert_to_tensor(variable)
    dtype = weights.dtype
    # Keras' own rule for slices moves all rows by their momentum, too.
    gradient, direct = preconditioner.split(tf.cast(tf.convert_to_tensor(gradient), dtype), delayed)
    (slot,) = keras_private.slots(optimizer, "momentums", [variable])
    beta_1 = tf.cast(optimizer.beta_1, dtype)
    momentums = slot + (gradient - slot) * (1 - beta_1)
    slot.assign(momentums)
    step = tf.cast(optimizer.iterations + 1, dtype)
    is_nadam = isinstance(optimizer, _nadams())
    product, schedule = keras_private.nadam_schedule(optimizer, dtype) if is_nadam else (None, 1.0)
    correction = preconditioner.bias_correction(beta_1, step)
    inputs = preconditioner.UpdateInputs(
        weights, gradient, direct, momentums, beta_1, step, correction, product, schedule
    )
    update = preconditioner.nadam(inputs) if is_nadam else preconditioner.adam(inputs)
    if isinstance(optimizer, _addons_optimizers("LAMB")):
        update = _scaled_by_lamb(optimizer, update, variable, weights)
    variable.assign_sub(tf.cast(rate, dtype) * update)


def _scaled_by_lamb(lamb: Any, update: tf.Tensor, variable: Any, weights: tf.Tensor) -> tf.Tensor:
    if keras_private.decays_in_step(lamb, variable):
        update += tf.cast(lamb.weight_decay, weights.dtype) * weights
    if keras_private.adapts_layer(lamb, variable):
        update = preconditioner.to_length_of(weights, update)
    return update
