"""Keras 2's `BackupAndRestore`, which does not say whether it has found a backup."""

from __future__ import annotations

from collections.abc import Sequence

from tf_gradcomp.keras.common.restarts import tell_if_backup_is_gone
from tf_gradcomp.keras.common.version import keras
from tf_gradcomp.keras.keras2 import keras_private


def tell_if_backups_are_gone(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Tells the user that a restarted job has found no backup, after all callbacks have begun."""
    for callback in callbacks:
        restores = isinstance(callback, keras.callbacks.BackupAndRestore)
        if restores and not any(keras_private.initial_place(callback.model, None)):
            tell_if_backup_is_gone(callback)
