"""Hooks into the functions of Keras 3 that write and read the files of a model."""

from __future__ import annotations

import functools
import inspect
import io
import math
import os
import zipfile
from collections.abc import Callable
from typing import Any

import h5py
import keras
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format as _legacy_h5
from keras.src.saving import saving_lib as _saving_lib
from keras.src.utils import file_utils as _file_utils

from tf_gradcomp.keras.common.hooks import replace
from tf_gradcomp.keras.keras3.keras_private import NamedBuffer
from tf_gradcomp.keras.keras3.shards import replace_shards
from tf_gradcomp.whole_files import replacing, replacing_path

_Save = Callable[[keras.Model, str, Callable[[], Any], Callable[[], Any]], None]


def on_save(save: _Save, leaves_out_optimizer: Callable[[keras.Model, str], bool]) -> None:
    """Has `save(model, path, write, original)` called where Keras 3 writes a file of a model.

    `write` writes a temporary file, and renames it. HDF5 is first written in memory: on a full
    disk, HDF5 ends the process. Only files with a URL are written by `original`. All public
    functions and callbacks use this function. If `leaves_out_optimizer(model, path)` is true, files
    in Keras' old HDF5 format lack the optimizer.
    """

    def save_model(
        original: Any,
        model: Any,
        filepath: Any,
        *args: Any,  # Keras 3.15 has the format of the weights here, and Keras 3.16 has not
        **kwargs: Any,
    ) -> None:
        call = inspect.signature(original).bind(model, filepath, *args, **kwargs)
        call.apply_defaults()
        zipped = call.arguments["zipped"]
        path = str(filepath)

        def write_to(target: Any) -> None:
            call.arguments["filepath"] = target
            original(*call.args, **call.kwargs)

        as_usual = functools.partial(write_to, filepath)

        def one_file() -> None:
            with replacing(path) as file:
                write_to(file)

        def folder() -> None:
            write_to(buffer := io.BytesIO())
            with replacing_path(path) as new, zipfile.ZipFile(buffer) as archive:
                archive.extractall(new)

        if isinstance(filepath, io.IOBase):
            as_usual()
        elif zipped != path.endswith(".keras"):
            as_usual()  # raises an error
        elif _file_utils.is_remote_path(path):
            save(model, path, as_usual, as_usual)
        else:
            save(model, path, one_file if zipped else folder, as_usual)

    replace(_saving_lib, "save_model", save_model)
    _on_save_weights(save)
    _on_save_legacy(save, leaves_out_optimizer)


def _on_save_weights(save: _Save) -> None:
    def save_weights(
        original: Any,
        model: Any,
        filepath: Any,
        max_shard_size: Any = None,
        objects_to_skip: Any = None,
    ) -> None:
        def write_to(target: Any) -> None:
            original(model, target, max_shard_size, objects_to_skip)

        def one_file() -> None:
            write_to(buffer := NamedBuffer(filepath))
            with replacing(path) as file:
                file.write(buffer.getbuffer())

        def shards() -> None:
            replace_shards(path, _bytes_of(model), write_to)

        path = str(filepath)
        as_usual = functools.partial(write_to, filepath)
        if _file_utils.is_remote_path(path):
            save(model, path, as_usual, as_usual)
        elif max_shard_size is None:
            save(model, path, one_file, as_usual)
        else:
            save(model, path, shards, as_usual)

    replace(_saving_lib, "save_weights_only", save_weights)


def _bytes_of(model: keras.Model) -> int:
    """Returns the bytes of a model's variables, without the residuals of its optimizer."""
    optimizer = getattr(model, "optimizer", None)
    of_optimizer = optimizer.variables if optimizer else []
    return sum(
        math.prod(one.shape) * tf.as_dtype(one.dtype).size
        for one in [*model.variables, *of_optimizer]
    )


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

        def write() -> None:
            buffer = io.BytesIO()
            with h5py.File(buffer, "w") as in_memory:
                original(model, in_memory, overwrite, include_optimizer)
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)  # as Keras does
            with replacing(path) as file:
                file.write(buffer.getbuffer())

        as_usual = functools.partial(original, model, filepath, overwrite, include_optimizer)
        if isinstance(filepath, h5py.File):
            as_usual()
        else:
            save(model, path, write, as_usual)

    replace(_legacy_h5, "save_model_to_hdf5", save_model)


def remember_attributes_to_skip(out_of_scope: Callable[[Callable[[], Any]], Any]) -> None:
    """Has Keras determine only once which attributes of a class hold no state.

    Keras 3.15 stores the result under one name and looks it up under another. So each save and load
    creates an object of each class again, among them an optimizer with variables, and frees only
    part of the memory. In the scope of a strategy, all workers would have to create these variables
    together, but only the chief writes. `out_of_scope(make)` calls `make` outside every scope.
    """

    @functools.cache
    def remembered(original: Any, obj_type: str) -> Any:
        return out_of_scope(lambda: original(obj_type))

    replace(_saving_lib, "get_attr_skipset", remembered)


_OnBackup = Callable[[keras.callbacks.BackupAndRestore, Callable[[], None]], None]


def on_backups(save: _OnBackup, restore: _OnBackup, delete: _OnBackup) -> None:
    """Has each function called with `(callback, original)` for a `BackupAndRestore` method."""

    def hooked(hook: _OnBackup, original: Any, self: Any, *_: Any) -> None:
        hook(self, functools.partial(original, self))

    hooks = {"_save_model": save, "on_train_begin": restore, "on_train_end": delete}
    for name, hook in hooks.items():
        replace(keras.callbacks.BackupAndRestore, name, functools.partial(hooked, hook))
