"""Connects Keras' optimizers of Adam's family with `tf_gradcomp.adam`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_gradcomp.adam import preconditioner
from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.private import keras3 as keras_private
from tf_gradcomp.private.patching import with_methods

STEPS: dict[type, preconditioner.Step] = {
    keras.optimizers.Adam: preconditioner.adam,
    keras.optimizers.AdamW: preconditioner.adam,
    keras.optimizers.Nadam: preconditioner.nadam,
    keras.optimizers.Lamb: preconditioner.lamb,
}


def possible_preconditioner(optimizer: keras.optimizers.Optimizer) -> Preconditioner | None:
    """Returns the preconditioner that an optimizer allows; None if it has no second moment."""
    if type(optimizer) not in STEPS:
        return None
    return Preconditioner(
        float(optimizer.beta_2),
        float(optimizer.epsilon),
        amsgrad=bool(getattr(optimizer, "amsgrad", False)),
        corrects_epsilon=STEPS[type(optimizer)] is preconditioner.adam,
        squares_each_slice=True,
    )


def allowed() -> Iterable[type]:
    """Returns the classes of optimizers that can be preconditioned."""
    return STEPS


def updating(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer that updates; only in Keras 2 can it be inside another optimizer."""
    return optimizer


@contextlib.contextmanager
def momentum_only(
    optimizer: keras.optimizers.Optimizer,
    divided: Sequence[keras.Variable],
    delayed: Sequence[tf.Tensor | bool],
) -> Iterator[None]:
    """Within this context, an optimizer treats gradients as already divided and clipped.

    Gradients of `divided` weights that are `delayed` bypass the momentum.
    """
    step = next(STEPS[class_] for class_ in type(optimizer).__mro__ if class_ in STEPS)
    full_update = optimizer.update_step
    index = functools.partial(keras_private.variable_index, optimizer)
    is_delayed = dict(zip(map(index, divided), delayed, strict=True))

    constants = _step_constants(optimizer, divided)

    def update_step(gradient: Any, variable: Any, rate: Any) -> None:
        """Replaces Keras' method: gradients that are mostly delayed bypass the momentum."""
        if index(variable) in is_delayed:
            _update(
                optimizer, step, constants, gradient, variable, rate, is_delayed[index(variable)]
            )
        else:
            full_update(gradient, variable, rate)

    clipped = {"_clip_gradients": lambda gradients: gradients}
    with with_methods(optimizer, update_step=update_step, **clipped):
        yield


class _StepConstants(NamedTuple):
    """Numbers that an update computes once for all variables of a dtype."""

    step: tf.Tensor
    correction: tf.Tensor
    new_share: tf.Tensor  # of the gradient in the momentum


def _step_constants(
    optimizer: Any, variables: Sequence[keras.Variable]
) -> dict[tf.DType, _StepConstants]:
    step = tf.cast(optimizer.iterations, tf.float32) + 1
    constants = {}
    for dtype in dict.fromkeys(tf.as_dtype(variable.dtype) for variable in variables):
        step_value = tf.cast(step, dtype)
        correction = preconditioner.bias_correction(optimizer.beta_1, step_value)
        constants[dtype] = _StepConstants(
            step_value, correction, tf.constant(1 - optimizer.beta_1, dtype)
        )
    return constants


def _update(
    optimizer: Any,
    step: preconditioner.Step,
    constants: dict[tf.DType, _StepConstants],
    gradient: Any,
    variable: Any,
    rate: Any,
    delayed: tf.Tensor | bool,
) -> None:
    weights = tf.convert_to_tensor(variable)
    dtype = weights.dtype
    # Keras' own rule for slices moves all rows by their momentum, too.
    gradient, direct = preconditioner.split(tf.cast(tf.convert_to_tensor(gradient), dtype), delayed)
    (slot,) = keras_private.slots(optimizer, "momentums", [variable])
    dtype_constants = constants[dtype]
    optimizer.assign_add(slot, (gradient - slot) * dtype_constants.new_share)
    product = None
    if isinstance(optimizer, keras.optimizers.Nadam):
        product = tf.cast(keras_private.nadam_product(optimizer), dtype)
    inputs = preconditioner.UpdateInputs(
        weights,
        gradient,
        direct,
        tf.convert_to_tensor(slot),
        optimizer.beta_1,
        dtype_constants.step,
        dtype_constants.correction,
        product,
    )
    optimizer.assign_sub(variable, tf.cast(rate, dtype) * step(inputs))
