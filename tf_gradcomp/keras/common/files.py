"""Files and restarts of a job of several workers."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

from tf_gradcomp.environment import RESTARTS
from tf_gradcomp.exchange.saving import Saving
from tf_gradcomp.groups.messages import log_info
from tf_gradcomp.keras.common import equality
from tf_gradcomp.keras.common.wrappers import wrappers_of
from tf_gradcomp.keras_version import keras, keras_private
from tf_gradcomp.strategy.coordinated import coordinated, writes_file
from tf_gradcomp.strategy.strategy import MultiWorkerMirroredStrategy, strategy_of_workers

_RESUMES = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)


def warn_if_nothing_is_saved(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Warns at the start of `fit` that a restarted job would begin from zero."""
    if RESTARTS in os.environ and not any(isinstance(callback, _RESUMES) for callback in callbacks):
        log_info(
            "gradcomp run would restart this job from zero, because fit saves nothing: add "
            "gc.callbacks.BackupAndRestore(folder) to its callbacks."
        )


def warn_if_backup_is_gone(callback: keras.callbacks.BackupAndRestore) -> None:
    """Warns that a restarted job has found no backup."""
    if os.environ.get(RESTARTS, "0") != "0":
        log_info(
            "BackupAndRestore: this restarted job begins from zero, because there is no backup in "
            f"{os.fspath(callback.backup_dir)!r} here. If it had saved, save to a disk that all "
            "workers share."
        )


def warn_if_backups_are_gone(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Tells the user, after all callbacks have begun, that Keras 2 has found no backup."""
    for callback in callbacks:
        restores = isinstance(callback, keras.callbacks.BackupAndRestore)
        if restores and not any(keras_private.initial_position(callback.model, None)):
            warn_if_backup_is_gone(callback)


def savings_of(model: keras.Model) -> list[Saving]:
    """Returns the objects that save the state of a model's wrapped optimizers.

    Before they read the state, they give this model equal variables on all workers.
    """
    wrappers = list(wrappers_of(model))
    for wrapper in wrappers:
        if wrapper.rounds is not None:
            wrapper.rounds.add_model(model)
    return [wrapper.exchange.saving for wrapper in wrappers if wrapper.exchange.built]


def is_coordinated(model: keras.Model) -> bool:
    """Whether workers save a model together, or its optimizer has state of each worker."""
    return strategy_of_workers() is not None or any(wrappers_of(model))


@contextlib.contextmanager
def saving_model(model: keras.Model, path: str) -> Iterator[bool]:
    """Coordinates a save of a model; yields whether this worker writes the file."""
    if not is_coordinated(model):
        yield True
        return
    with coordinated(savings_of(model), path) as writes:
        yield writes


def collect_at_epoch_end(model: keras.Model) -> None:
    """Ends rounds of local steps, compares the workers' models, and collects state."""
    synchronize(model)
    equality.compare_model(model, equality.EPOCH_END)
    collect(model)


def collect(model: keras.Model) -> None:
    """Collects the workers' local state, so that the chief's callbacks can save alone."""
    if isinstance(model.distribute_strategy, MultiWorkerMirroredStrategy):
        for saving in savings_of(model):
            saving.collect()


def synchronize(model: keras.Model) -> None:
    """Ends the rounds of local steps of a model's optimizers, before the model is read."""
    if isinstance(model.distribute_strategy, MultiWorkerMirroredStrategy):
        for wrapper in wrappers_of(model):
            wrapper.synchronize(model)


def release(model: keras.Model) -> None:
    """Frees the memory of collected state, because steps are about to change the state."""
    if isinstance(model.distribute_strategy, MultiWorkerMirroredStrategy):
        for saving in savings_of(model):
            saving.forget()


def log_path(callback: keras.callbacks.Callback, path: str, nowhere: str | None = None) -> str:
    """Returns where a callback of this worker writes logs: elsewhere, if the chief writes there.

    Args:
        callback: The callback.
        path: The program's path for the logs.
        nowhere: The result if the chief writes to the path; by default a temporary folder.
    """
    if writes_file(type(callback).__name__, path):
        return path
    return tempfile.mkdtemp(prefix="gradcomp-") if nowhere is None else nowhere
