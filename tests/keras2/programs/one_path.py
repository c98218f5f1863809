"""Saves by one path on all workers, and on the chief alone.

one_path.py FOLDER
"""

import os
import pathlib

import numpy as np
import tensorflow as tf
from common import compiled, fit, new_strategy

import tf_gradcomp as gc
from tests.ranks import argument, compressed, data, report

keras = tf.keras
os.chdir(argument(1))
strategy = new_strategy()


def new_model():
    return compiled(lambda: compressed(keras.optimizers.Adam(0.01), "adacomp"), strategy)


def sums(model):
    exchange = model.optimizer.exchange
    return [np.asarray(exchange.saving.read(v)).tolist() for v in exchange.residuals]


def held(path):
    with strategy.scope():
        model = keras.models.load_model(path)
        model.optimizer.build(model.trainable_variables)
    return {"weights": [w.tolist() for w in model.get_weights()], "residuals": sums(model)}


def weights(path):
    (model := new_model()).load_weights(path)
    return [w.tolist() for w in model.get_weights()]


if __name__ == "__main__":
    model = new_model()
    checkpoint = keras.callbacks.ModelCheckpoint
    on_all = [checkpoint("epoch.keras"), checkpoint("epoch.h5"), keras.callbacks.CSVLogger("log")]
    on_all += [checkpoint("epoch.weights.h5", save_weights_only=True)]
    on_chief = [checkpoint("chief-epoch.keras")] if gc.is_chief() else []
    fit(model, *data(4), epochs=2, callbacks=[*on_all, *on_chief])
    if gc.is_chief():
        model.save("chief.keras")
        model.save_weights("chief.h5")
    for _ in range(2):  # the second time over the first
        for name in ("m.keras", "m.h5", "folder"):
            model.save(name)
        for name in ("w.h5", "w.weights.h5", "w"):
            model.save_weights(name)
    model_state = {"weights": [w.tolist() for w in model.get_weights()], "residuals": sums(model)}
    whole = ("epoch.keras", "epoch.h5", "m.keras", "m.h5", "chief-epoch.keras", "chief.keras")
    parts = ("epoch.weights.h5", "w.h5", "w.weights.h5", "w", "chief.h5", "folder")
    report(
        {
            "wanted": model_state,
            "held": {name: held(name) for name in whole},
            "weights": {name: weights(name) for name in parts},
            "log": len(pathlib.Path("log").read_text().splitlines()),
            "hidden": [name for name in os.listdir(".") if name.startswith(".")],
        }
    )
