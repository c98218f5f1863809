"""Settings of each tensor that may change between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

Settings: TypeAlias = Sequence[int] | tf.Tensor | tf.Variable


def tensor_of(settings: Settings) -> tf.Tensor:
    """Returns the settings as int64 [tensors]."""
    if not isinstance(settings, (tf.Tensor, tf.Variable)):
        settings = list(settings)
    return tf.convert_to_tensor(settings, tf.int64)
