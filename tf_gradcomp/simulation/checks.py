"""Checks of the inputs of learners: a model, a method, and batches with equal shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.keras.callbacks.compression_monitor import find_exchange
from tf_gradcomp.keras.common.version import keras
from tf_gradcomp.keras.local.gossip import Gossip, settings_of
from tf_gradcomp.keras.local.settings import LocalSteps


def check_model(model: keras.Model) -> None:
    """Refuses a model that learners cannot train."""
    if tf.distribute.has_strategy():
        raise ValueError("Learners: leave the strategy's scope; all learners are in this process.")
    if not model.built or getattr(model, "optimizer", None) is None:
        raise ValueError(
            "Learners: the model must be built, and compiled with a loss and an optimizer, before "
            "you pass it; call model.build and model.compile."
        )
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            f"Learners: {type(model).__name__} has its own train_step, which learners would not "
            "call; override the model's compute_loss instead."
        )
    if find_exchange(model) is not None:
        raise ValueError(
            "Learners: the model's optimizer is already compressed; compile the model with the "
            "inner optimizer, and give the compressor to Learners."
        )
    optimizer = model.optimizer
    scales = isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer)
    of_keras_3 = ("loss_scale_factor", "gradient_accumulation_steps")
    if scales or any(getattr(optimizer, setting, None) for setting in of_keras_3):
        raise ValueError(
            "Learners: the model's optimizer scales losses or accumulates gradients, but learners "
            "do neither. Use a plain optimizer. Under mixed_float16, where Keras scales losses "
            "itself, use another policy, or with Keras 3 model.compile(..., "
            "auto_scale_loss=False)."
        )


def checked_method(
    compressor: compressors.Compressor | compressors.Auto,
) -> compressors.Compressor:
    """Returns a compressor; refuses one that chooses its method by the network."""
    if isinstance(compressor, compressors.Auto):
        raise ValueError(
            f"Learners: {compressor.name!r} chooses by the network, but a simulation has no "
            "network; name a method, such as 'adacomp'."
        )
    return compressor


def checked_local_steps(given: Any) -> LocalSteps | None:
    """Returns the settings of local steps; refuses gossip."""
    settings = settings_of(given)
    if isinstance(settings, Gossip):
        raise ValueError("Learners: gossip is not simulated; train with it in a job.")
    return settings


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Returns the inputs and labels of a batch; lists of numbers as arrays."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            "Learners: a batch must be a pair of inputs and labels; sample weights are not "
            f"supported, and a model's own loss takes labels. Received {type(batch).__name__} of "
            f"{len(batch) if hasattr(batch, '__len__') else 'no length'}."
        )
    return _array(batch[0]), _array(batch[1])


def _array(values: Any) -> Any:
    """Returns lists of numbers as an array, and other values unchanged."""
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
            f"Learners: a batch of {size} cannot be divided equally among {learners} learners; "
            "use a batch size that is a multiple, and drop_remainder=True."
        )
    each = size // learners
    return [
        tf.nest.map_structure(
            lambda a, i=i: tf.convert_to_tensor(a[i * each : (i + 1) * each]), (x, y)
        )
        for i in range(learners)
    ]
