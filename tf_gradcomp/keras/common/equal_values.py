"""Compares the values of the ranks' models where no strategy keeps them equal."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from tf_gradcomp.exchange.gradients import path_of
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.handshake import WorkersDisagreeError
from tf_gradcomp.keras.common.version import keras

TRAINING = (
    "exchanging gradients for the first time",
    "give all ranks those of rank 0, by gc.callbacks.BroadcastInitialState() in fit, or "
    "gc.broadcast_initial_state(model).",
)
SAVING = (
    "collecting state to save",
    "some ranks alone have changed them since training began, as ReduceLROnPlateau does by a "
    "metric, which is another one on each rank: average what a callback acts on.",
)


def agree_on_values(
    group: Group,
    weights: Sequence[keras.Variable],
    slots: Sequence[keras.Variable],
    purpose: tuple[str, str],
    seconds: float | None = None,
) -> None:
    """Compares the values of variables over all ranks; refuses to go on if they differ.

    Slots of optimizers have names with a number that each rank counts by itself. `purpose` is
    `TRAINING` or `SAVING`.
    """
    values = {f"value of {path_of(v)!r}": _checksum(v) for v in weights}
    values |= {f"value of the optimizer's variable {i}": _checksum(v) for i, v in enumerate(slots)}
    action, advice = purpose
    try:
        group.agree({"next action": action, **values}, seconds)
    except WorkersDisagreeError as error:
        raise WorkersDisagreeError(f"{error} If only values differ: {advice}") from error


def _checksum(variable: keras.Variable) -> int:
    return zlib.crc32(np.asarray(variable).tobytes())
