"""Notices about restarts, and the end of a run at which `gradcomp run` adds workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from tf_gradcomp.environment import REGROUP, REGROUPED
from tf_gradcomp.groups.notices import tell_user
from tf_gradcomp.groups.processes import Processes
from tf_gradcomp.keras.common.version import keras, keras_private
from tf_gradcomp.noted_saves import may_be_restarted, saved_before

_RESUMES = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)


def tell_if_nothing_is_saved(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Tells the user at the start of `fit` that a restarted job would begin from zero."""
    if may_be_restarted() and not any(isinstance(one, _RESUMES) for one in callbacks):
        tell_user(
            "gradcomp run would restart this job from zero, because fit saves nothing: add "
            "gc.callbacks.BackupAndRestore(folder) to its callbacks."
        )


def tell_if_backup_is_gone(callback: keras.callbacks.BackupAndRestore) -> None:
    """Tells the user that a restarted job has found no backup."""
    if saved_before():
        tell_user(
            "BackupAndRestore: training begins from zero, because there is no backup in "
            f"{os.fspath(callback.backup_dir)!r} here, although this job saved before it was "
            "restarted. Save to a disk that all workers share."
        )


def tell_if_backups_are_gone(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Tells the user, after all callbacks have begun, that Keras 2 has found no backup."""
    for callback in callbacks:
        restores = isinstance(callback, keras.callbacks.BackupAndRestore)
        if restores and not any(keras_private.initial_place(callback.model, None)):
            tell_if_backup_is_gone(callback)


def end_if_asked(processes: Callable[[], Processes]) -> None:
    """Ends all workers if `gradcomp run` has asked the chief, to start them again with more."""
    path = os.environ.get(REGROUP)
    if path and processes().from_first(np.array([os.path.exists(path)], np.float64))[0]:
        tell_user("fit ends before this epoch: gradcomp run starts it again with more workers.")
        raise SystemExit(REGROUPED)
