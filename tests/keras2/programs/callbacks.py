"""Runs `fit` with callbacks, resumes from a backup, and takes several steps in an execution.

callbacks.py FOLDER
"""

import contextlib
import os

import tensorflow as tf
from common import compiled, fit, new_strategy, state_of

import tf_gradcomp as gc
from tests.delays import checked
from tests.ranks import argument, compressed, data, digest, exchange_of, report

keras = tf.keras
FOLDER = argument(1)


class StoppedError(Exception):
    pass


class StopsIn(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._epoch:
            raise StoppedError


def lgc_model():
    layers = [keras.layers.Input((4,), dtype="int32"), keras.layers.Embedding(20, 8)]
    layers += [keras.layers.Flatten(), keras.layers.Dense(64), keras.layers.Dense(64)]
    return keras.Sequential([*layers, keras.layers.Dense(3)])


def logged(strategy, compressor, callback, build=None, policy=False):
    def make():
        return compressed(keras.optimizers.SGD(0.05), compressor, new_model())

    def new_model():
        return gc.Policy.from_model(build()) if policy else None

    given = {"build": build} if build else {}
    model = compiled(make, strategy, **given)
    callbacks = [callback, gc.callbacks.CompressionMonitor(table=False)]
    history = fit(model, *data(10), epochs=2, callbacks=callbacks).history
    return {
        "history": {name: [float(value) for value in values] for name, values in history.items()},
        "weights": digest(model.trainable_variables),
    }


def delays(strategy):
    model = compiled(lambda: compressed(keras.optimizers.SGD(0.01), "random_k"), strategy)
    callbacks, found = checked(2, exchange_of)
    fit(model, *data(6), callbacks=callbacks)
    return found()


def resumed(strategy):
    """Trained for 2 epochs with an end after the first; and at once."""

    def model():
        return compiled(lambda: compressed(keras.optimizers.Adam(1e-2), "no_compression"), strategy)

    def backup():
        return gc.callbacks.BackupAndRestore(os.path.join(FOLDER, "backup"))

    first = model()
    with contextlib.suppress(StoppedError):
        fit(first, *data(4), epochs=2, callbacks=[backup(), StopsIn(1)])
    second = model()
    epochs = fit(second, *data(4), epochs=2, callbacks=[backup()]).epoch
    whole = model()
    fit(whole, *data(4), epochs=2)
    return {"epochs": epochs, "resumed": state_of(second), "at once": state_of(whole)}


def in_executions_of(steps, strategy):
    """Keras 2 has several steps of an execution in one loop, and not in functions that it calls."""
    adacomp = "adacomp(bin_sizes=10)"
    model = compiled(lambda: compressed(keras.optimizers.SGD(0.05), adacomp), strategy)
    model.compile(model.optimizer, model.loss, steps_per_execution=steps)
    fit(model, *data(4), epochs=2)
    return state_of(model)


if __name__ == "__main__":
    strategy = new_strategy()
    lgc = gc.compressors.LGC(warmup_steps=3, training_steps=5, density=0.1)
    planned = gc.compressors.LGreCo(gc.compressors.TopK(density=0.1))
    plan = gc.callbacks.LayerwisePlan(table=False)
    training = gc.callbacks.AutoencoderTraining(learning_rate=1e-3)
    report(
        {
            "plan": logged(strategy, planned, plan, lgc_model),
            "autoencoder": logged(strategy, lgc, training, lgc_model, policy=True),
            "delays": delays(strategy),
            "resumed": resumed(strategy),
            "executions": [in_executions_of(steps, strategy) for steps in (1, 2)],
        }
    )
