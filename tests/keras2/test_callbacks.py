"""Callbacks log under Keras 2, and jobs resume from a backup."""

import contextlib
import os
from pathlib import Path

import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.delays import assert_cosines, checked
from tests.keras2.common import compiled, fit, new_strategy, state_of
from tests.keras2.jobs import (
    by_horovod,
    by_strategy,
    needs_horovod,
    tf_keras,
)
from tests.ranks import argument, compressed, data, digest, exchange_of, report

PROGRAM = Path(__file__)  # each worker runs this file

keras = tf.keras


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


@pytest.fixture(scope="module")
def callbacks(tmp_path_factory):
    return by_strategy(PROGRAM, tmp_path_factory.mktemp("backups"))


def check_callbacks(callbacks):
    first, second = callbacks
    for name in ("plan", "autoencoder"):
        assert first[name]["weights"] == second[name]["weights"]
        history = first[name]["history"]
        for measure in ("payload_bytes", "compression_ratio", "residual_norm", "skipped_steps"):
            assert len(history[measure]) == 2
    assert first["plan"]["history"]["compression_ratio"][-1] > 4
    assert first["plan"]["history"]["plan_ratio"][-1] != 1
    assert first["autoencoder"]["history"]["lgc_phase"][-1] > 2
    assert first["autoencoder"]["history"]["autoencoder_error"][-1] < 1
    for worker in callbacks:
        assert_cosines(worker["delays"], 2, checks=2)
    resumed = first["resumed"]
    assert resumed["epochs"] == [1]
    assert resumed["resumed"] == resumed["at once"] == second["resumed"]["resumed"]


def check_executions(reports):
    (one, two), others = (report["executions"] for report in reports)
    assert one == two
    assert others == [one, two]


def test_several_steps_in_an_execution_train_as_one_by_one(callbacks):
    check_executions(callbacks)


def test_callbacks_log_and_a_job_resumes_from_a_backup(callbacks):
    check_callbacks(callbacks)


@tf_keras
@needs_horovod
def test_callbacks_do_so_under_horovod(tmp_path):
    reports = by_horovod(PROGRAM, tmp_path)
    check_callbacks(reports)
    check_executions(reports)


if __name__ == "__main__":
    FOLDER = argument(1)
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
