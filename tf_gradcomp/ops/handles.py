"""Resource handles of variables."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def handles_of(variables: Sequence[tf.Tensor | tf.Variable]) -> list[tf.Tensor]:
    """Returns the resource handles of variables; a handle stays as it is."""
    return [variable.handle if hasattr(variable, "handle") else variable for variable in variables]
