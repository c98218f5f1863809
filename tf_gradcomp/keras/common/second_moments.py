"""Preconditioning: the setting `precondition`, and the owner of second moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.adam.handover import InnerState
from tf_gradcomp.adam.preconditioner import LARGEST, SECOND_MOMENT, Preconditioner
from tf_gradcomp.compressors import Compressor
from tf_gradcomp.exchange.gradients import native
from tf_gradcomp.keras_version import keras_module, keras_private

adam = keras_module("adam")

AUTO, LOCAL = "auto", "local"
_SLOTS = {SECOND_MOMENT: "velocities", LARGEST: "velocity_hats"}  # Keras' names for its own


def preconditioner_for(
    optimizer: Any, compressor: Compressor, setting: str | None
) -> Preconditioner | None:
    """Returns the preconditioner that `precondition=setting` adds before a compressor, if any.

    Args:
        optimizer: The inner optimizer, without a loss scaler around it.
        compressor: The method. `"auto"` preconditions only methods that train better with it.
        setting: `"auto"`, `"local"` or None.

    Raises:
        ValueError: If `setting` is none of these, or the optimizer cannot be preconditioned.
    """
    if setting not in (AUTO, LOCAL, None):
        raise ValueError(f'precondition: expected "auto", "local" or None; received {setting!r}.')
    possible = adam.possible_preconditioner(optimizer)
    if setting == LOCAL and possible is None:
        names = ", ".join(dict.fromkeys(class_.__name__ for class_ in adam.allowed()))
        raise ValueError(
            f'precondition="local" is for {names}; received '
            f"{type(adam.updating(optimizer)).__name__}. Use "
            'precondition="auto", which does not divide for other optimizers.'
        )
    if setting is None or (setting == AUTO and not compressor.helped_by_precondition):
        return None
    return possible


def inner_state(
    optimizer: Any, variables: Sequence[Any], local: Callable[[tf.Variable], tf.Variable]
) -> InnerState | None:
    """Returns the state of an optimizer of Adam's family on one replica; None for others."""
    possible = adam.possible_preconditioner(optimizer)
    if possible is None:
        return None
    core = adam.updating(optimizer)

    def slots(kind: str) -> list[tf.Variable]:
        return [local(native(slot)) for slot in keras_private.slots(core, kind, variables)]

    names = dict.fromkeys([SECOND_MOMENT, possible.root_of])
    moments = {name: slots(_SLOTS[name]) for name in names}
    return InnerState(tf.cast(optimizer.iterations, tf.int64), moments, slots("momentums"))


_MOMENTS_ARE_TAKEN = "_moments_are_taken"


def take_moments(optimizer: Any) -> None:
    """Marks an optimizer's second moments as not updated; its wrapper has separate ones."""
    setattr(optimizer, _MOMENTS_ARE_TAKEN, True)


def check_moments_not_taken(optimizer: Any) -> None:
    """Raises for an optimizer whose second moments a wrapper has taken."""
    if hasattr(optimizer, _MOMENTS_ARE_TAKEN):
        raise ValueError(
            f"{type(optimizer).__name__} was wrapped in a CompressedOptimizer that keeps its "
            "second moments. The optimizer's own second moments are not updated, so its steps "
            "would be much too long, alone or in another CompressedOptimizer. Use a new "
            "optimizer. To carry the state over, save it with the first CompressedOptimizer "
            "(model.save_weights) and load it into another: see docs/checkpoints.md."
        )


def check_unchanged(before: Preconditioner | None, now: Preconditioner | None) -> None:
    """Refuses settings of second moments that changed after the wrapper was created."""
    if _as_float32(before) != _as_float32(now):  # which variables of Keras 2's are
        raise ValueError(
            "The inner optimizer's beta_2, epsilon or amsgrad was changed after it was wrapped in "
            f"a CompressedOptimizer, which divides gradients with the earlier values: {before} "
            f"then, {now} now. Set them before you wrap the optimizer."
        )


def _as_float32(preconditioner: Preconditioner | None) -> Preconditioner | None:
    if preconditioner is None:
        return None
    beta_2, epsilon = map(np.float32, (preconditioner.beta_2, preconditioner.epsilon))
    return dataclasses.replace(preconditioner, beta_2=float(beta_2), epsilon=float(epsilon))
