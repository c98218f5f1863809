"""Notices about restarts by `gradcomp run --max-restarts`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tf_gradcomp.environment import RESTARTS
from tf_gradcomp.groups.messages import log_info
from tf_gradcomp.keras.common.version import keras, keras_private

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
