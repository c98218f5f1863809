"""Refuses Keras' other backends, before an import of Keras fails with an error of theirs."""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path


def check() -> None:
    """Checks that Keras computes with TensorFlow.

    Raises:
        ImportError: If Keras has another backend.
    """
    backend, source = _backend()
    if backend != "tensorflow" and not _is_keras_2():
        raise ImportError(
            f"tf_gradcomp works with Keras on TensorFlow only, and {source} says that Keras' "
            f"backend is {backend}: set the environment variable KERAS_BACKEND to tensorflow "
            "before Keras is imported."
        )


def _backend() -> tuple[str, str]:
    """The backend that Keras has or will choose, and what says so."""
    if keras := sys.modules.get("keras"):
        return keras.backend.backend(), "keras.config.backend()"
    if named := os.environ.get("KERAS_BACKEND"):
        return named, "the environment variable KERAS_BACKEND"
    home = os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")
    path = Path(home, "keras.json")
    try:
        return json.loads(path.read_text()).get("backend", "tensorflow"), str(path)
    except (OSError, ValueError):
        return "tensorflow", "Keras"


def _is_keras_2() -> bool:
    """Whether `tf.keras` is Keras 2, which ignores these settings."""
    if os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True"):
        return True
    try:
        return metadata.version("keras").startswith("2.")
    except metadata.PackageNotFoundError:  # it may be keras-nightly
        return False
