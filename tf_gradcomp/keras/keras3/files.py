"""Replaces the functions of Keras 3 that write and read the files of a model."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import keras
import tensorflow as tf

from tf_gradcomp.groups.group import outside_scope
from tf_gradcomp.groups.messages import log_info
from tf_gradcomp.keras.common.files import (
    is_coordinated,
    saving_model,
    savings_of,
    warn_if_backup_is_gone,
)
from tf_gradcomp.keras.keras3.steps import swap_averages
from tf_gradcomp.private import keras3 as keras_private
from tf_gradcomp.private.patching import patch
from tf_gradcomp.strategy.coordinated import coordinated
from tf_gradcomp.strategy.strategy import strategy_of_workers
from tf_gradcomp.whole_files import move, replacing, replacing_path, temporary_folder

_PROGRESS = "tf_gradcomp_progress"  # in the file, so that both are written at once
_RANDOM = "tf_gradcomp_random"
_BROKEN = (
    "The backup %r cannot be read (%s). %s To start from scratch, delete the folder %r; to "
    "continue from another file, delete the folder and load that file before fit."
)
_NO_OTHER = (
    "There is no other backup; with double_checkpoint=True, Keras also keeps the second-to-last "
    "backup."
)


@patch(
    keras_private.SAVE_MODEL,
    why="Workers overwrite each other's file, and a kill leaves half a file.",
    test="test_save_model_of_keras",
    essential=True,
)
def save_model(original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Writes a `.keras` file, or a folder, for all workers that give its path."""

    def write(target: Any) -> None:
        _outside_scope(lambda: original(model, target, *args, **kwargs))

    def replace(path: str) -> None:
        if path.endswith(".keras"):
            with replacing(path) as file:
                write(file)
        else:
            with replacing_path(path) as new:
                write(new)

    _write_coordinated(model, filepath, write, replace)


@patch(
    keras_private.SAVE_WEIGHTS,
    why="Workers overwrite each other's file, and a kill leaves half a file.",
    test="test_save_weights",
    essential=True,
)
def save_weights(
    original: Any,
    model: Any,
    filepath: Any,
    max_shard_size: Any = None,
    objects_to_skip: Any = None,
) -> None:
    """Writes one file of weights, or several, for all workers that give their path.

    One file is first written in memory: on a full disk, HDF5 ends the process.
    """

    def write(target: Any) -> None:
        _outside_scope(lambda: original(model, target, max_shard_size, objects_to_skip))

    def replace(path: str) -> None:
        if max_shard_size is None:
            write(buffer := keras_private.NamedBuffer(filepath))
            with replacing(path) as file:
                file.write(buffer.getbuffer())
        else:
            with temporary_folder(path) as folder:
                write(os.path.join(folder, os.path.basename(path)))
                move(folder, os.path.dirname(os.path.realpath(path)))

    _write_coordinated(model, filepath, write, replace)


def _write_coordinated(
    model: Any, filepath: Any, write: Callable[[Any], None], replace: Callable[[str], None]
) -> None:
    """Writes to an open file or a URL by `write`, and to a path of all workers by `replace`."""
    path = str(filepath)
    if isinstance(filepath, io.IOBase) or not is_coordinated(model):
        write(filepath)
        return
    with saving_model(model, path) as writes:
        if writes and "://" in path:
            write(filepath)
        elif writes:
            replace(path)


def _outside_scope(write: Callable[[], None]) -> None:
    """Writes outside the scope of a strategy.

    To find out which attributes hold no state, Keras creates an optimizer. In the scope, all
    workers would have to create its variables together, but only the chief writes.
    """
    if tf.distribute.has_strategy():
        outside_scope(functools.partial(contextvars.copy_context().run, write))
    else:
        write()


@contextlib.contextmanager
def adapted(callback: keras.callbacks.Callback, model: keras.Model) -> Iterator[None]:
    """Within this context, a callback of Keras works for a model on all workers."""
    with contextlib.ExitStack() as stack:
        backs_up = isinstance(callback, keras.callbacks.BackupAndRestore) and is_coordinated(model)
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            stack.enter_context(keras_private.swapping_by(callback, swap_averages))
        elif backs_up and "://" not in os.fspath(callback.backup_dir):
            functions = (functools.partial(function, callback) for function in (_back_up, _restore))
            stack.enter_context(keras_private.backing_up(callback, *functions))
        yield


def _back_up(callback: keras.callbacks.BackupAndRestore) -> None:
    """Writes a backup on one worker; the last backup stays until the new backup is complete."""
    backup = keras_private.Backup.of(callback)
    with _backing_up(callback, backup.weights) as writes:
        if not writes:
            return
        os.makedirs(callback.backup_dir, exist_ok=True)
        if callback.double_checkpoint:
            _copy(backup.weights, backup.former_weights)
            _copy(backup.progress, backup.former_progress)
        progress = json.dumps(backup.trained)
        buffer = keras_private.weights_in_hdf5(callback.model)
        with h5py.File(buffer, "a") as file:
            file.attrs[_PROGRESS] = progress
            file.attrs[_RANDOM] = json.dumps(keras_private.random_states(callback.model))
        with replacing(backup.weights) as written:
            written.write(buffer.getbuffer())
        with replacing(backup.progress) as written:
            written.write(progress.encode())


def _restore(callback: keras.callbacks.BackupAndRestore) -> None:
    """Restores the last complete backup, and logs the epoch at which the job resumes."""
    strategy = strategy_of_workers()
    if strategy is not None and not strategy.group.processes.is_first:
        callback.delete_checkpoint = False  # the first worker deletes it at the end
    backup = keras_private.Backup.of(callback)
    model = callback.model
    problem: tuple[str, Exception] | None = None
    optimizer = model.optimizer
    for weights, progress in (
        (backup.weights, backup.progress),
        (backup.former_weights, backup.former_progress),
    ):
        if not os.path.exists(weights):
            continue
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        try:
            epoch = _checked_epoch(weights, progress, optimizer)
            keras_private.load_hdf5(model, weights)
            _continue_random_numbers(model, weights)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            problem = problem or (weights, error)
            continue
        if problem:
            log_info(f"The backup {problem[0]!r} cannot be read; the backup before it is restored.")
        keras_private.start_at(model, epoch)
        log_info(f"BackupAndRestore: resumed at epoch {epoch + 1}, from {weights!r}.")
        return
    if problem:
        message = _BROKEN % (*problem, _NO_OTHER, os.fspath(callback.backup_dir))
        raise ValueError(message) from problem[1]
    warn_if_backup_is_gone(callback)


@contextlib.contextmanager
def _backing_up(callback: Any, path: str) -> Iterator[bool]:
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
    """Whether other processes share this callback and its files, also under Horovod."""
    if not getattr(callback, "on_all_workers", False):
        return False
    return any(not saving.group.processes.is_first for saving in savings_of(callback.model))


def _copy(path: str, to: str) -> None:
    if os.path.exists(path):
        with open(path, "rb") as file, replacing(to) as copy:
            shutil.copyfileobj(file, copy)


def _checked_epoch(weights: str, progress_path: str, optimizer: Any) -> int:
    """Returns the number of completed epochs; refuses a file without the optimizer's state."""
    with h5py.File(weights, "r") as file:
        if optimizer is not None and not _holds_arrays(file.get("optimizer", {})):
            raise ValueError("it holds no state of the optimizer")
        progress = file.attrs.get(_PROGRESS)
    if progress is None:  # written by Keras
        if not os.path.exists(progress_path):
            return 0
        with open(progress_path) as text:
            progress = text.read()
    return int(json.loads(progress)["epoch"])


def _continue_random_numbers(model: keras.Model, weights: str) -> None:
    """Restores the replicas' random states; Horovod ranks keep their local seeds."""
    if any(not saving.group.by_strategy for saving in savings_of(model)):
        return
    with h5py.File(weights, "r") as file:
        states = file.attrs.get(_RANDOM)
    if states is not None:
        keras_private.set_random_states(model, json.loads(states))


def _holds_arrays(group: Any) -> bool:
    values = group.values()
    return any(isinstance(value, h5py.Dataset) or _holds_arrays(value) for value in values)
