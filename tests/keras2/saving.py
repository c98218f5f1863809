"""Saves and loads models of Keras 2 in each format; programs share it."""

import contextlib
import os

import numpy as np
import tensorflow as tf

from tests.keras2.common import compiled, slots_of
from tests.ranks import BY_HOROVOD, RANK, argument, digest


def saving_on_all(model):
    """All save here, each to its own folder; the sums of residuals are there within this."""
    return (
        model.optimizer.exchange.saving.saving_on_all() if BY_HOROVOD else contextlib.nullcontext()
    )


def sums(model):
    exchange = model.optimizer.exchange
    return [exchange.saving.read(variable) for variable in exchange.residuals]


def seen(model):
    with saving_on_all(model):
        return {
            "weights": digest(model.trainable_variables),
            "slots": digest(slots_of(model.optimizer)),
            "iterations": int(model.optimizer.iterations.numpy()),
            "residuals": [float(np.abs(total).sum()) for total in sums(model)],
        }


def saved(model, name, form):
    path = os.path.join(folder_of_rank(), f"{name}.{form}")
    with saving_on_all(model):
        if form == "tf":
            model.save_weights(path, save_format="tf")
        elif form == "checkpoint":
            path = tf.train.Checkpoint(model=model).save(path)
        else:
            model.save(path)
    return path


def loaded(path, form, make, strategy):
    if form in ("h5", "keras"):
        with strategy.scope():
            return tf.keras.models.load_model(path)
    model = compiled(make, strategy, seed=3)
    if form == "tf":
        model.load_weights(path)
    else:
        tf.train.Checkpoint(model=model).restore(path)
    with strategy.scope():  # variables that are created now have the restored values
        model.optimizer.build(model.trainable_variables)
    return model


def folder_of_rank():
    return os.path.join(argument(1), f"rank{RANK}")
