"""Tests `fit` with local steps: all observers see equal models on all workers."""

from pathlib import Path

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.distributed.common import Setup, digits, linear_model, scalar, state_digest
from tests.ranks import RANK, argument, digest, exchange_of, report
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
BATCH, EPOCHS, STEPS = 32, 2, 5


def build():
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(3),
        ]
    )


def optimizer(steps=3):
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    local = gc.LocalSteps(steps, outer, warmup_steps=1)
    return setup.wrap(keras.optimizers.Adam(0.01), precondition="auto", local_steps=local)


class Seen(keras.callbacks.Callback):
    """All variables, after each step and each epoch."""

    def __init__(self):
        super().__init__()
        self.steps, self.epochs, self.validated, self.losses = [], [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(digest(self.model.trainable_variables))
        self.losses.append(float(logs["loss"]))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(digest(self.model.variables))
        self.validated.append(logs["val_loss"])


def values(model):
    return [np.asarray(variable) for variable in model.variables]


def residuals(model):
    return [np.asarray(residual) for residual in exchange_of(model).residuals]


def train(name, **settings):
    model = setup.model(build, optimizer, metrics=["accuracy"], **settings)
    seen = Seen()
    path = f"{FOLDER}/{name}.weights.h5"
    callbacks = [
        gc.callbacks.CompressionMonitor(table=False),
        keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=7),
        keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
        seen,
    ]
    history = model.fit(
        x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks,
        validation_data=(x, y),
    )  # fmt: skip
    return model, seen, history.history


def in_fit():
    model, seen, logs = train("model")
    before = values(model)
    single = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    return {
        "steps": seen.steps,
        "epochs": seen.epochs,
        "validated": seen.validated,
        "losses": seen.losses,
        "logs": {name: logs[name] for name in ("loss", "rounds", "drift", "compression_ratio")},
        "exchanges": exchange_of(model).exchanges,
        "iterations": scalar(model.optimizer.iterations),
        "values": before,
        "evaluated": single,
        "weights": [np.asarray(w) for w in model.get_weights()],
    }


def resumed():
    """From the checkpoint that was written after the seventh step, in the middle of a round."""
    model = setup.model(build, optimizer)
    with setup.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    model.load_weights(f"{FOLDER}/model.weights.h5")
    seen = {
        "values": values(model),
        "residuals": residuals(model),
        "momentum": [np.asarray(v) for v in model.optimizer.outer_optimizer.variables],
        "iterations": scalar(model.optimizer.iterations),
    }
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return {**seen, "continued": state_digest(model)["weights"]}


def with_steps_per_execution(steps):
    model = setup.model(linear_model, optimizer, steps_per_execution=steps)
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return {"values": values(model), "exchanges": exchange_of(model).exchanges}


def on_batches():
    """Returns the losses of batches; worker 1 has a short batch within a round."""
    model = setup.model(linear_model, optimizer)
    rows = [BATCH // 2 if step == 2 and RANK == 1 else BATCH for step in range(8)]
    return [float(model.train_on_batch(x[:row], y[:row])) for row in rows]


class Saves(keras.callbacks.Callback):
    """Saves after the second step, which ends a round, and within the next round."""

    def __init__(self):
        super().__init__()
        self.statistics = []

    def on_train_batch_end(self, batch, logs=None):
        if batch in (1, 2):
            self.model.save_weights(f"{FOLDER}/after_{batch}.weights.h5")
            self.statistics.append(digest(self.model.non_trainable_variables))

    def on_train_end(self, logs=None):
        self.statistics.append(digest(self.model.variables))


def statistics():
    """Saves in the first epoch without residuals; then loads the first weights, and repeats."""
    uncompressed = Setup("optimizer", "no_compression")
    sgd = lambda: uncompressed.wrap(keras.optimizers.SGD(0.1), local_steps=2)  # noqa: E731
    model = uncompressed.model(build, sgd)
    with setup.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    model.save_weights(f"{FOLDER}/first.weights.h5")
    seen = []
    for _ in range(2):
        model.load_weights(f"{FOLDER}/first.weights.h5")
        saves = Saves()
        rows = 4 * BATCH
        model.fit(x[:rows], y[:rows], batch_size=BATCH, shuffle=False, verbose=0, callbacks=[saves])
        seen.append(saves.statistics)
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="module")
def jobs(folder):
    return results(run_workers(PROGRAM, 2, [folder]))


def test_workers_differ_within_rounds_and_agree_after_each_epoch(jobs):
    first, second = (job["in_fit"] for job in jobs)
    # The first step is synchronous, then rounds begin; the checkpoint of step 7 ends one early.
    equal = [one == other for one, other in zip(first["steps"], second["steps"], strict=True)]
    assert equal == [True, False, False, True, False, False, True, False, False, True]
    assert first["epochs"] == second["epochs"]  # also of the statistics of BatchNormalization
    assert first["validated"] == second["validated"]
    assert first["values"] == second["values"]
    assert first["weights"] == second["weights"]


def test_rounds_are_counted_and_logged(jobs):
    for job in jobs:
        seen = job["in_fit"]
        # 1 synchronous step; rounds of 3 and 1 steps; then of 2 until the save, and of 3.
        assert seen["logs"]["rounds"] == [2, 4]
        assert seen["exchanges"] == 1 + 4
        assert seen["iterations"] == EPOCHS * STEPS
        assert all(0 < drift < 1 for drift in seen["logs"]["drift"])
        assert seen["logs"]["drift"] == jobs[0]["in_fit"]["logs"]["drift"]  # a mean over workers
        assert all(ratio > 1 for ratio in seen["logs"]["compression_ratio"])


def test_logs_of_a_step_come_from_the_latest_exchange(jobs):
    first, second = (job["in_fit"]["losses"] for job in jobs)
    assert first == second
    # Exchanges are in steps 1, 4 and 10; those after steps 5 and 7 are seen in the next step.
    latest = [1, 1, 1, 4, 4, 6, 6, 8, 8, 10]
    assert first == [first[step - 1] for step in latest]
    assert len(set(first)) == len(set(latest))
    assert first[-1] == pytest.approx(jobs[0]["in_fit"]["logs"]["loss"][-1], rel=1e-6)


def test_a_worker_that_traces_its_step_alone_does_not_wait(jobs):
    first, second = (job["on_batches"] for job in jobs)
    assert first == second
    latest = [1, 1, 1, 4, 4, 4, 7, 7]  # steps with an exchange
    assert first == [first[step - 1] for step in latest]


def test_restored_best_weights_are_the_validated_weights(jobs):
    for job in jobs:
        seen = job["in_fit"]
        assert seen["evaluated"][0] == pytest.approx(min(seen["validated"]), rel=1e-5)


def test_statistics_are_averaged_before_each_save_and_after_a_reload(jobs):
    first, second = (job["statistics"] for job in jobs)
    assert first == second
    assert first[0] == first[1]


def test_workers_resume_alike_from_a_checkpoint_within_an_epoch(jobs):
    first, second = (job["resumed"] for job in jobs)
    assert first == second
    assert first["iterations"] == 7
    assert any(np.any(one) for one in first["momentum"])
    assert any(np.any(one) for one in first["residuals"])


def test_one_process_resumes_with_what_workers_have_not_sent(jobs, folder):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(3),
        ]
    )
    inner = keras.optimizers.Adam(0.01)
    model.compile(gc.CompressedOptimizer(inner, "top_k(density=0.2)", local_steps=3), loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.load_weights(folder / "model.weights.h5")
    inner.learning_rate = 0.0
    model.optimizer.apply([np.zeros(v.shape, "float32") for v in model.trainable_variables])
    trained = [i for i, v in enumerate(model.variables) if v.trainable]
    saved, waits = jobs[0]["resumed"]["values"], jobs[0]["resumed"]["residuals"]
    for i, waiting_value in zip(trained, waits, strict=True):
        expected = np.float32(saved[i]) - np.float32(waiting_value)
        np.testing.assert_array_equal(np.asarray(model.variables[i]), expected)


def test_several_steps_in_an_execution_are_steps_of_a_round(jobs):
    for job in jobs:
        by_step, by_four = job["per_execution"]
        assert by_step == by_four == jobs[0]["per_execution"][0]


if __name__ == "__main__":
    FOLDER = argument(1)
    setup = Setup("optimizer", "top_k(density=0.2)")
    x, y = digits(BATCH * STEPS)
    report(
        {
            "statistics": statistics(),
            "on_batches": on_batches(),
            "in_fit": in_fit(),
            "resumed": resumed(),
            "per_execution": [with_steps_per_execution(steps) for steps in (1, 4)],
        }
    )
