"""Keras 3's `BackupAndRestore`: one backup for all workers, complete or absent."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import keras

from tf_gradcomp.groups.notices import tell_user
from tf_gradcomp.keras.common.files import savings_of
from tf_gradcomp.keras.common.restarts import tell_if_backup_is_gone
from tf_gradcomp.keras.common.wrappers import wrappers_of
from tf_gradcomp.keras.keras3 import keras_private
from tf_gradcomp.strategy.coordinated import coordinated
from tf_gradcomp.strategy.strategy import strategy_of_workers
from tf_gradcomp.whole_files import replacing

_PLACE = "tf_gradcomp_place"  # in the file, so that both are written at once
_RANDOM = "tf_gradcomp_random"
_BROKEN = (
    "The backup %r cannot be read (%s). %s To start from scratch, delete the folder %r; to "
    "continue from another file, delete the folder and load that file before fit."
)
_NO_OTHER = (
    "There is no other backup; with double_checkpoint=True, Keras also keeps the second-to-last "
    "backup."
)


def save(callback: keras.callbacks.BackupAndRestore, original: Callable[[], None]) -> None:
    """Writes a backup on one worker; the last backup stays until the new backup is complete."""
    if not _is_ours(callback):
        original()
        return
    backup = keras_private.Backup.of(callback)
    with _saving(callback, backup.weights) as writes:
        if not writes:
            return
        os.makedirs(callback.backup_dir, exist_ok=True)
        if callback.double_checkpoint:
            _copy(backup.weights, backup.former_weights)
            _copy(backup.place, backup.former_place)
        place = json.dumps(backup.trained)
        buffer = keras_private.weights_in_hdf5(callback.model)
        with h5py.File(buffer, "a") as file:
            file.attrs[_PLACE] = place
            file.attrs[_RANDOM] = json.dumps(keras_private.random_states(callback.model))
        with replacing(backup.weights) as written:
            written.write(buffer.getbuffer())
        with replacing(backup.place) as written:
            written.write(place.encode())


def restore(callback: keras.callbacks.BackupAndRestore, original: Callable[[], None]) -> None:
    """Restores the last complete backup, and logs the epoch at which the job resumes."""
    if not _is_ours(callback):
        original()
        return
    backup = keras_private.Backup.of(callback)
    model = callback.model
    problem: tuple[str, Exception] | None = None
    optimizer = model.optimizer
    for weights, place in (
        (backup.weights, backup.place),
        (backup.former_weights, backup.former_place),
    ):
        if not os.path.exists(weights):
            continue
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        try:
            epoch = _checked_epoch(weights, place, optimizer)
            keras_private.load_hdf5(model, weights)
            _continue_random_numbers(model, weights)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            problem = problem or (weights, error)
            continue
        if problem:
            tell_user(
                f"The backup {problem[0]!r} cannot be read; the backup before it is restored."
            )
        keras_private.start_at(model, epoch)
        tell_user(f"BackupAndRestore: resumed at epoch {epoch + 1}, from {weights!r}.")
        return
    if problem:
        message = _BROKEN % (*problem, _NO_OTHER, os.fspath(callback.backup_dir))
        raise ValueError(message) from problem[1]
    tell_if_backup_is_gone(callback)


def delete(callback: keras.callbacks.BackupAndRestore, original: Callable[[], None]) -> None:
    """Deletes the backup at the end of training, on one worker."""
    strategy = strategy_of_workers()
    if (strategy is None or strategy.group.processes.is_first) and not _left_to_first(callback):
        original()


def _is_ours(callback: keras.callbacks.BackupAndRestore) -> bool:
    wrapped = any(wrappers_of(callback.model))
    remote = "://" in os.fspath(callback.backup_dir)
    return (wrapped or strategy_of_workers() is not None) and not remote


@contextlib.contextmanager
def _saving(callback: Any, path: str) -> Iterator[bool]:
    savings = savings_of(callback.model)
    if not getattr(callback, "on_all_workers", False):
        with coordinated(savings, path) as writes:
            yield writes
        return
    for saving in savings:
        saving.collect()
    with coordinated(savings, path) as writes:
        yield writes and not _left_to_first(callback)
    for saving in savings:
        if not saving.group.by_strategy:  # if nobody has waited for the file
            saving.group.processes.agree({"next action": "continuing after a backup"})


def _left_to_first(callback: Any) -> bool:
    """Returns whether other processes share this callback and its files, also under Horovod."""
    if not getattr(callback, "on_all_workers", False):
        return False
    return any(not saving.group.processes.is_first for saving in savings_of(callback.model))


def _copy(path: str, to: str) -> None:
    if os.path.exists(path):
        with open(path, "rb") as file, replacing(to) as copy:
            shutil.copyfileobj(file, copy)


def _checked_epoch(weights: str, place: str, optimizer: Any) -> int:
    """Returns the number of completed epochs; refuses a file without the optimizer's state."""
    with h5py.File(weights, "r") as file:
        if optimizer is not None and not _holds_arrays(file.get("optimizer", {})):
            raise ValueError("it holds no state of the optimizer")
        told = file.attrs.get(_PLACE)
    if told is None:  # written by Keras
        if not os.path.exists(place):
            return 0
        with open(place) as text:
            told = text.read()
    return int(json.loads(told)["epoch"])


def _continue_random_numbers(model: keras.Model, weights: str) -> None:
    """Lets replicas draw on where the backup ended; ranks of Horovod keep their own seeds."""
    if any(not saving.group.by_strategy for saving in savings_of(model)):
        return
    with h5py.File(weights, "r") as file:
        states = file.attrs.get(_RANDOM)
    if states is not None:
        keras_private.set_random_states(model, json.loads(states))


def _holds_arrays(group: Any) -> bool:
    values = group.values()
    return any(isinstance(value, h5py.Dataset) or _holds_arrays(value) for value in values)
