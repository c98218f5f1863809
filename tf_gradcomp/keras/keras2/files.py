"""Files and backups of Keras 2 on several workers."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from tf_gradcomp.keras.common.files import is_coordinated, saving_model
from tf_gradcomp.private import keras2 as keras_private
from tf_gradcomp.private.patching import patch
from tf_gradcomp.whole_files import replacing_path

_WHY = "Workers that save to one path overwrite each other's files."


def save(original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Writes a file of a model for all workers that give its path."""
    path = os.fspath(filepath) if isinstance(filepath, str | os.PathLike) else "://"
    # If `overwrite` is False, Keras asks the user; the other functions lack this argument.
    overwrite = kwargs.get("overwrite", args[0] if args else True)
    asks = not overwrite and os.path.exists(path)
    if "://" in path or asks or not is_coordinated(model):
        original(model, filepath, *args, **kwargs)
        return
    with saving_model(model, path) as writes:
        if writes:
            with replacing_path(path) as new:
                original(model, new, *args, **kwargs)


for _target in keras_private.SAVE_MODEL:
    patch(_target, why=_WHY, test="test_save", essential=True)(save)


@patch(keras_private.SAVE_WEIGHTS, why=_WHY, test="test_save", essential=True)
def save_weights(original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Writes weights in HDF5; weights in TensorFlow's format are a checkpoint."""
    save_format = kwargs.get("save_format", args[1] if len(args) > 1 else None)
    by_name = "h5" if str(filepath).endswith((".h5", ".keras", ".hdf5")) else "tf"
    if (save_format or by_name).lower().strip() in ("h5", "hdf5", "keras"):
        save(original, model, filepath, *args, **kwargs)
    else:
        original(model, filepath, *args, **kwargs)


def adapted(_callback: Any, _model: Any) -> contextlib.AbstractContextManager[None]:
    """Does nothing: Keras 2 gives each worker a folder for its backups."""
    return contextlib.nullcontext()
