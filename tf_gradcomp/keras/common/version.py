"""The Keras version that this process trains with: Keras 3, or Keras 2 as `tf.keras`.

TensorFlow decides: `tf.keras` is Keras 2 up to TensorFlow 2.15, and if the environment variable
`TF_USE_LEGACY_KERAS` is 1 (the package `tf_keras`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import tensorflow as tf

IS_KERAS_2 = not hasattr(tf.keras, "ops")
if TYPE_CHECKING or not IS_KERAS_2:
    import keras
else:
    keras = tf.keras
NAME = "Keras 2" if IS_KERAS_2 else "Keras 3"

__all__ = ["IS_KERAS_2", "NAME", "check_is_keras_3", "keras", "keras_module"]


def keras_module(name: str) -> Any:
    """Imports `keras2/<name>.py` or `keras3/<name>.py`, for the Keras version in use."""
    package = "keras2" if IS_KERAS_2 else "keras3"
    return importlib.import_module(f"tf_gradcomp.keras.{package}.{name}")


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
