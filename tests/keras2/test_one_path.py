"""Saves of Keras 2 by one path on all workers, and on the chief alone."""

import os
from pathlib import Path

import numpy as np
import tensorflow as tf

import tf_gradcomp as gc
from tests.keras2.common import compiled, fit, new_strategy
from tests.keras2.jobs import (
    RESTORED,
    largest_difference,
    tf_keras,
)
from tests.ranks import argument, compressed, data, report
from tests.workers import result, run_workers

PROGRAM = Path(__file__)  # each worker runs this file

keras = tf.keras


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


@tf_keras
def test_workers_save_by_one_path_and_the_chief_alone(tmp_path):
    workers = run_workers(PROGRAM, 2, [tmp_path])
    for worker in workers:
        seen = result(worker)
        wanted = seen["wanted"]
        assert any(np.any(total) for total in wanted["residuals"])
        for name, held in seen["held"].items():
            assert held["weights"] == wanted["weights"], name
            assert largest_difference(held["residuals"], wanted["residuals"]) <= RESTORED, name
        for name, weights in seen["weights"].items():
            assert weights == wanted["weights"], name
        assert (seen["log"], seen["hidden"]) == (3, [])
    assert "holds only the residuals of the chief" not in workers[0].stderr


if __name__ == "__main__":
    os.chdir(argument(1))
    strategy = new_strategy()
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
            "log": len(Path("log").read_text().splitlines()),
            "hidden": [name for name in os.listdir(".") if name.startswith(".")],
        }
    )
