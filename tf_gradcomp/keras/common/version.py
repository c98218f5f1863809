"""The Keras version that this process trains with: Keras 3, or Keras 2 as `tf.keras`.

TensorFlow decides: `tf.keras` is Keras 2 up to TensorFlow 2.15, and if the environment variable
`TF_USE_LEGACY_KERAS` is 1 (the package `tf_keras`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_gradcomp.groups.agreement import keras_version
from tf_gradcomp.strategy.patches import Patch, UntestedVersionError, apply

IS_KERAS_2 = not hasattr(tf.keras, "ops")
if TYPE_CHECKING or not IS_KERAS_2:
    import keras
else:
    keras = tf.keras
# What is tested, and how to install it.
_TESTED_3 = "Keras 3.15, and TensorFlow 2.17 to 2.21", '"keras==3.15.*"'
_TESTED_2 = "TensorFlow 2.15, and tf_keras 2.21", '"tensorflow-cpu==2.15.*"'
NAME = "Keras 2" if IS_KERAS_2 else "Keras 3"

__all__ = ["IS_KERAS_2", "NAME", "check_is_keras_3", "install_patches", "keras", "keras_module"]


def keras_module(name: str) -> Any:
    """Imports `keras2/<name>.py` or `keras3/<name>.py`, for the Keras version in use."""
    package = "keras2" if IS_KERAS_2 else "keras3"
    return importlib.import_module(f"tf_gradcomp.keras.{package}.{name}")


def install_patches() -> None:
    """Replaces the functions of TensorFlow and of this Keras that `patches.py` lists.

    Raises:
        UntestedVersionError: If a function that training needs is missing or has changed.
    """
    versions = f"Keras {keras_version()} and TensorFlow {tf.__version__}"
    tested, install = _TESTED_2 if IS_KERAS_2 else _TESTED_3
    remedy = f"It is tested with {tested}: pip install {install}."
    try:
        patches = keras_module("patches").PATCHES
    except (AttributeError, ImportError) as error:
        raise UntestedVersionError(
            f"tf_gradcomp cannot train with {versions}: {error}. {remedy}"
        ) from error
    _apply_once(patches, versions, remedy)


@functools.cache
def _apply_once(patches: Sequence[Patch], versions: str, remedy: str) -> None:
    apply(patches, versions, remedy)


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
