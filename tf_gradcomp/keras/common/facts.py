"""Settings and values of optimizers that workers compare with each other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_gradcomp.exchange.gradients import path_of
from tf_gradcomp.groups.agreement import WorkersDisagreeError, digest
from tf_gradcomp.groups.group import Group
from tf_gradcomp.keras.common.inner import in_loss_scaler
from tf_gradcomp.keras.common.version import keras


def facts_of(label: str, optimizer: keras.optimizers.Optimizer) -> dict[str, str]:
    """An optimizer's settings, as text that is the same on all workers with the same program.

    The class alone, if it cannot be saved, such as with a schedule without `get_config`.
    """
    settings = {"class": type(optimizer).__name__}
    with contextlib.suppress(NotImplementedError, TypeError):
        settings |= optimizer.get_config()
    facts = {
        f"{label}'s {name}": json.dumps(_without_ids(value), sort_keys=True, default=_plain)
        for name, value in settings.items()
        if name not in ("name", "inner_optimizer")  # names have numbers, counted by each process
    }
    for inside in in_loss_scaler(optimizer)[1:]:
        facts |= facts_of("loss-scaled optimizer", inside)
    return facts


def _without_ids(value: Any) -> Any:
    """A value of a config without Keras' marks of objects that occur twice in a file."""
    if isinstance(value, Mapping):
        return {str(k): _without_ids(v) for k, v in value.items() if k != "shared_object_id"}
    return [*map(_without_ids, value)] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """Returns a value of a config in a form that JSON can hold."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    config = value.get_config() if hasattr(value, "get_config") else {}
    return {"class": type(value).__name__, **config}


TRAINING = (
    "exchanging gradients for the first time",
    "give all ranks the values of rank 0, with gc.callbacks.BroadcastInitialState() in fit, or "
    "gc.broadcast_initial_state(model).",
)
SAVING = (
    "collecting state to save",
    "only some ranks have changed them since training began, as ReduceLROnPlateau does if its "
    "metric differs on each rank: average the metrics on which callbacks act.",
)


def agree_on_values(
    group: Group,
    weights: Sequence[keras.Variable],
    slots: Sequence[keras.Variable],
    purpose: tuple[str, str],
    seconds: float | None = None,
) -> None:
    """Compares the values of variables over all ranks; raises an error if they differ.

    Names of optimizers' slots contain a number that each rank counts by itself. `purpose` is
    `TRAINING` or `SAVING`.
    """
    values = {f"value of {path_of(v)!r}": _checksum(v) for v in weights}
    values |= {f"value of the optimizer's variable {i}": _checksum(v) for i, v in enumerate(slots)}
    action, advice = purpose
    try:
        group.processes.agree({"next action": action, **values}, seconds)
    except WorkersDisagreeError as error:
        raise WorkersDisagreeError(f"{error} If only values differ: {advice}") from error


def _checksum(variable: keras.Variable) -> str:
    return digest(np.asarray(variable))
