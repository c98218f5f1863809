"""Hooks into the functions of Keras 3 that write and read the files of a model."""

from __future__ import annotations

import functools
import io
import os
import zipfile
from collections.abc import Callable
from typing import IO, Any

import h5py
import keras
from keras.src.legacy.saving import legacy_h5_format as _legacy_h5
from keras.src.saving import saving_lib as _saving_lib
from keras.src.utils import file_utils as _file_utils

from tf_gradcomp.keras.common.hooks import replace
from tf_gradcomp.keras.keras3.keras_private import NamedBuffer

_Write = Callable[[IO[bytes]], Any]
_Save = Callable[[keras.Model, str, _Write | None, Callable[[], Any]], None]


def on_save(save: _Save, leaves_out_optimizer: Callable[[keras.Model, str], bool]) -> None:
    """Has `save(model, path, write, original)` called where Keras 3 writes a file of a model.

    `write` writes it into an open file; it is None where Keras writes several files, or to a URL.
    All public functions and callbacks come here. The optimizer is left out of files in Keras' old
    HDF5 format if `leaves_out_optimizer(model, path)` says so. HDF5 files are written in memory
    first, for HDF5 ends the process where the disk is full.
    """

    def save_model(original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        as_usual = functools.partial(original, model, filepath, *args, **kwargs)
        if isinstance(filepath, io.IOBase):
            as_usual()
            return
        one_file = str(filepath).endswith(".keras") and not _file_utils.is_remote_path(filepath)
        write = (lambda file: original(model, file, *args, **kwargs)) if one_file else None
        save(model, str(filepath), write, as_usual)

    replace(_saving_lib, "save_model", save_model)
    _on_save_weights(save)
    _on_save_legacy(save, leaves_out_optimizer)


def _on_save_weights(save: _Save) -> None:
    def save_weights(
        original: Any,
        model: Any,
        filepath: Any,
        max_shard_size: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        def write(file: IO[bytes]) -> None:
            buffer = NamedBuffer(filepath)
            original(model, buffer, None, *args, **kwargs)
            file.write(buffer.getbuffer())

        one_file = max_shard_size is None and not _file_utils.is_remote_path(filepath)
        as_usual = functools.partial(original, model, filepath, max_shard_size, *args, **kwargs)
        save(model, str(filepath), write if one_file else None, as_usual)

    replace(_saving_lib, "save_weights_only", save_weights)


def _on_save_legacy(save: _Save, leaves_out_optimizer: Callable[[keras.Model, str], bool]) -> None:
    def save_model(
        original: Any,
        model: Any,
        filepath: Any,
        overwrite: bool = True,
        include_optimizer: bool = True,
    ) -> None:
        path = filepath.filename if isinstance(filepath, h5py.File) else os.fspath(filepath)
        if include_optimizer:
            include_optimizer = not leaves_out_optimizer(model, path)

        def write(file: IO[bytes]) -> None:
            buffer = io.BytesIO()
            with h5py.File(buffer, "w") as in_memory:
                original(model, in_memory, overwrite, include_optimizer)
            file.write(buffer.getbuffer())

        as_usual = functools.partial(original, model, filepath, overwrite, include_optimizer)
        if isinstance(filepath, h5py.File):
            as_usual()
        else:
            save(model, path, write, as_usual)

    replace(_legacy_h5, "save_model_to_hdf5", save_model)


def on_broken_file(describe: Callable[[str], str]) -> None:
    """Adds `describe(path)` to the error of a model's file that cannot be read.

    Keras' own errors name neither the file nor what to do.
    """

    def hooked(place: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except (OSError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
            path = args[place] if len(args) > place else kwargs.get("filepath")
            of_file = isinstance(error, OSError | zipfile.BadZipFile)
            of_file = of_file or "Unable to " in str(error)  # as h5py says it
            if of_file and isinstance(path, str | os.PathLike) and os.path.isfile(path):
                error.add_note(describe(os.fspath(path)))
            raise

    replace(_saving_lib, "load_model", functools.partial(hooked, 0))
    replace(_saving_lib, "load_weights_only", functools.partial(hooked, 1))


_OnBackup = Callable[[keras.callbacks.BackupAndRestore, Callable[[], None]], None]


def on_backups(save: _OnBackup, restore: _OnBackup, delete: _OnBackup) -> None:
    """Has each called with `(callback, original)` where `BackupAndRestore` does what its name says.

    Keras overwrites its only backup.
    """

    def hooked(hook: _OnBackup, original: Any, self: Any, logs: Any = None) -> None:
        hook(self, functools.partial(original, self))

    hooks = {"_save_model": save, "on_train_begin": restore, "on_train_end": delete}
    for name, hook in hooks.items():
        replace(keras.callbacks.BackupAndRestore, name, functools.partial(hooked, hook))
