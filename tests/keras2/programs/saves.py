"""Saves jobs in each format and resumes from it, including residuals.

saves.py FOLDER OPTIMIZER...
"""

import contextlib
import os

import numpy as np
import tensorflow as tf
from common import compiled, fit, new_strategy, slots_of
from optimizers import OPTIMIZERS

from tests.ranks import BY_HOROVOD, RANK, argument, compressed, data, digest, report

FORMATS = ("h5", "keras", "tf", "checkpoint")
LATER = ("h5", "checkpoint")  # of those, the ones that it trains on with
FOLDER = os.path.join(argument(1), f"rank{RANK}")


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
    path = os.path.join(FOLDER, f"{name}.{form}")
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


def optimizer_saves(name, strategy):
    def make():
        return compressed(OPTIMIZERS[name](), "adacomp")

    model = compiled(make, strategy)
    fit(model, *data(4))
    before = seen(model)
    result = {"before": before}
    for form in FORMATS:
        other = loaded(saved(model, name, form), form, make, strategy)
        result[form] = seen(other)
        if form in LATER:
            fit(other, *data(3, seed=2))
            result[f"{form}, later"] = digest(other.trainable_variables)
    return result


if __name__ == "__main__":
    os.makedirs(FOLDER)
    strategy = new_strategy()
    report({name: optimizer_saves(name, strategy) for name in argument(2).split(",")})
