"""Checks of what learners are given."""

from __future__ import annotations

import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.keras.callbacks.compression_monitor import find_exchange
from tf_gradcomp.keras.common.version import keras


def check_model(model: keras.Model) -> None:
    """Refuses a model that learners cannot train."""
    if tf.distribute.has_strategy():
        raise ValueError("Learners: leave the strategy's scope; all learners are in this process.")
    if not model.built or getattr(model, "optimizer", None) is None:
        raise ValueError(
            "Learners: the model must be built, and compiled with a loss and an optimizer, before "
            "it is given; call model.build and model.compile."
        )
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            f"Learners: {type(model).__name__} has a train_step of its own, which learners would "
            "not call; give the model its own compute_loss in place of it."
        )
    if find_exchange(model) is not None:
        raise ValueError(
            "Learners: the model's optimizer is compressed already; compile it with the inner "
            "optimizer, and give the compressor to Learners."
        )
    optimizer = model.optimizer
    scales = isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer)
    of_keras_3 = ("loss_scale_factor", "gradient_accumulation_steps")
    if scales or any(getattr(optimizer, setting, None) for setting in of_keras_3):
        raise ValueError(
            "Learners: the model's optimizer scales losses or accumulates gradients, and learners "
            "do neither; use a plain one, and where Keras scales losses by itself another policy "
            "than mixed_float16, or with Keras 3 model.compile(..., auto_scale_loss=False)."
        )


def checked_method(
    compressor: compressors.Compressor | compressors.Auto,
) -> compressors.Compressor:
    """Returns a compressor; refuses one that chooses its method by the network."""
    if isinstance(compressor, compressors.Auto):
        raise ValueError(
            f"Learners: {compressor.name!r} chooses by the network, and a simulation has none; "
            "name a method, such as 'adacomp'."
        )
    return compressor
