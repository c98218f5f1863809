"""Arguments of native ops: resource handles, and settings that may change between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

Settings: TypeAlias = Sequence[int] | tf.Tensor | tf.Variable  # one for each tensor


def handles_of(variables: Sequence[tf.Tensor | tf.Variable]) -> list[tf.Tensor]:
    """Returns the resource handles of variables; a handle stays as it is."""
    return [variable.handle if hasattr(variable, "handle") else variable for variable in variables]


def tensor_of(settings: Settings) -> tf.Tensor:
    """Returns settings as int64 [tensors]."""
    if not isinstance(settings, (tf.Tensor, tf.Variable)):
        settings = list(settings)
    return tf.convert_to_tensor(settings, tf.int64)
