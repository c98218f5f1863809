"""The Keras version that this process trains with: Keras 3, or Keras 2 as `tf.keras`.

TensorFlow decides: `tf.keras` is Keras 2 up to TensorFlow 2.15, and if the environment variable
`TF_USE_LEGACY_KERAS` is 1 (the package `tf_keras`).
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_gradcomp.groups.agreement import keras_version
from tf_gradcomp.groups.messages import log_warning
from tf_gradcomp.private.patching import PATCHES, UntestedVersionError, apply

IS_KERAS_2 = not hasattr(tf.keras, "ops")
if TYPE_CHECKING or not IS_KERAS_2:
    import keras
else:
    keras = tf.keras
NAME = "Keras 2" if IS_KERAS_2 else "Keras 3"
KERAS = "tensorflow.keras" if IS_KERAS_2 else "keras"  # the name of the module

__all__ = [
    "IS_KERAS_2",
    "KERAS",
    "NAME",
    "check_is_keras_3",
    "install_patches",
    "keras",
    "keras_module",
    "keras_private",
]

_VERSIONS = f"Keras {keras_version()} and TensorFlow {tf.__version__}"
# What is tested, and how to install it.
_TESTED_3 = "Keras 3.15, and TensorFlow 2.17 to 2.21", '"keras==3.15.*"'
_TESTED_2 = "TensorFlow 2.15, and tf_keras 2.21", '"tensorflow-cpu==2.15.*"'
_REMEDY = "It is tested with {}: pip install {}.".format(*(_TESTED_2 if IS_KERAS_2 else _TESTED_3))


def _imported(name: str) -> Any:
    """Imports a module that needs private API of Keras."""
    try:
        return importlib.import_module(f"tf_gradcomp.{name}")
    except (AttributeError, ImportError) as error:
        if isinstance(error, UntestedVersionError) or "keras" not in str(error):
            raise
        raise UntestedVersionError(
            f"tf_gradcomp cannot train with {_VERSIONS}: {error}. {_REMEDY}"
        ) from error


def check_is_keras_3() -> None:
    """Refuses Keras 2 and older versions of Keras 3."""
    if IS_KERAS_2:
        raise ImportError(
            "This part of tf_gradcomp is for Keras 3, and tf.keras is Keras 2 here: use TensorFlow "
            "2.17 or newer, and do not set TF_USE_LEGACY_KERAS. docs/keras2.md says what works "
            "with Keras 2."
        )
    if tuple(int(part) for part in keras.__version__.split(".")[:2]) < (3, 15):
        raise ImportError(
            f"tf_gradcomp works with Keras 3.15 and newer; found {keras.__version__}: pip install "
            "--upgrade keras."
        )


if not IS_KERAS_2:
    check_is_keras_3()
keras_private = _imported("private.keras2" if IS_KERAS_2 else "private.keras3")


def keras_module(name: str) -> Any:
    """Imports `keras2/<name>.py` or `keras3/<name>.py`, for the Keras version in use."""
    return _imported(f"keras.{'keras2' if IS_KERAS_2 else 'keras3'}.{name}")


@functools.cache
def install_patches() -> None:
    """Replaces the functions of TensorFlow and of this Keras that are decorated with `patch`.

    Raises:
        UntestedVersionError: If a function that training needs is missing or has changed.
    """
    importlib.import_module("tf_gradcomp.strategy.input_data")
    for name in ("training", "files"):
        keras_module(name)
    apply(PATCHES, _VERSIONS, _REMEDY, log_warning)
