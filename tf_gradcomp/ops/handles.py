"""Variables as the ops take them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def handles_of(variables: Sequence[tf.Tensor | tf.Variable]) -> list[tf.Tensor]:
    """The resource handles of variables; handles are taken as they are."""
    return [variable.handle if hasattr(variable, "handle") else variable for variable in variables]
