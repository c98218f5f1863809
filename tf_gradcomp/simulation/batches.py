"""Batches of learners: one pair of inputs and labels for all, and each learner's share."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Returns the inputs and labels of a batch; lists of numbers as arrays."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            "Learners: a batch must be a pair of inputs and labels; it has no weights of samples, "
            f"and a model's own loss takes labels. Received {type(batch).__name__} of "
            f"{len(batch) if hasattr(batch, '__len__') else 'no length'}."
        )
    return _array(batch[0]), _array(batch[1])


def _array(values: Any) -> Any:
    """Returns lists of numbers as an array, and other values as they are."""
    if isinstance(values, (list, tuple)) and all(
        isinstance(leaf, (int, float, np.number)) for leaf in tf.nest.flatten(values)
    ):
        return np.asarray(values)
    return values


def shares(x: Any, y: Any, learners: int) -> list[tuple[Any, Any]]:
    """Returns each learner's equal share of a batch."""
    x, y = _array(x), _array(y)
    if any(part is None for part in tf.nest.flatten((x, y))):
        raise ValueError("Learners: expected inputs and labels; received None for one of them.")
    sizes = [len(part) for part in tf.nest.flatten((x, y))]
    size = sizes[0]
    if len(set(sizes)) > 1:
        raise ValueError(
            "Learners: all inputs and labels of a batch must have as many rows; received "
            f"{', '.join(map(str, sizes))}."
        )
    if size % learners or not size:
        raise ValueError(
            f"Learners: a batch of {size} cannot be shared out equally among {learners} learners; "
            "use a batch size that is a multiple, and drop_remainder=True."
        )
    each = size // learners
    return [
        tf.nest.map_structure(
            lambda a, i=i: tf.convert_to_tensor(a[i * each : (i + 1) * each]), (x, y)
        )
        for i in range(learners)
    ]
