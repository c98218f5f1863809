"""Tests LGC between real workers: all phases, in each way to train, and in resumed jobs.

A worker's arguments:

    train FOLDER WAY PATTERN   trains, saves after each epoch, and resumes from three of the saves
    resume FOLDER              resumes from these, in another job
    backup FOLDER STEP         resumes from its last epoch; in that step, worker 1 is killed
"""

import os
import signal
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import rounding
from tests.distributed.common import Setup, digits, residual_sums, scalar, state_digest
from tests.ranks import RANK, SIZE, argument, exchange_of, report
from tests.workers import results, run_workers
from tf_gradcomp.compressors.lgc.job_state import AutoencoderHook
from tf_gradcomp.keras.callbacks.autoencoder_training import autoencoder_of

PROGRAM = Path(__file__)  # each worker runs this file
BATCH, STEPS, EPOCHS, BAD_STEP = 24, 8, 4, 5

# Epochs end in phase 1, in phase 2 and in phase 3.
SETTINGS = {"density": 0.1, "warmup_steps": 10, "training_steps": 6, "guard": 0.9}
PAIRS = {"encoder": [[1, 2, 2]], "decoder": [[1, 2, 2]], "slope": 1.0}
WEIGHTS = {
    "all_reduce": [0.5, 0.5, 0, 1, 1, 0, 0.5, 0],
    "parameter_server": [0.5, 0.5, 0, 1, 1, 0, 0.5, 0.5, 0],
}


def data():
    x, y = digits(BATCH * STEPS)
    x[BATCH * BAD_STEP + BATCH // SIZE] = np.nan
    return x, y


def layers():
    hidden = [keras.layers.Dense(width, activation="tanh") for width in (160, 32)]
    return keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(3)])


def built(way, pattern, **compile_args):
    coder = {**PAIRS, "weights": WEIGHTS[pattern]}
    setup = Setup(way, gc.compressors.LGC(pattern, **SETTINGS, autoencoder=coder))
    model = setup.model(layers, lambda: setup.wrap(keras.optimizers.SGD(0.1)), **compile_args)
    if way == "optimizer":
        with setup.strategy.scope():
            model.optimizer.build(model.trainable_variables)
    return model, exchange_of(model)


def seen(model, exchange):
    """Returns the state that is equal on all workers; `job` is so in a resumed job, too."""
    state = autoencoder_of(exchange)
    residuals = residual_sums(exchange)
    job = {name: np.asarray(value).tolist() for name, value in exchange.job_state.items()}
    for local in ("lgc_share_error", "lgc_norms", "lgc_vectors"):
        del job[local]
    return {
        **state_digest(model),
        "phase": state.stage,
        "learnt": state.last_learned,
        "collected": len(state.new_vectors()),
        "facts": exchange.hooks.get(AutoencoderHook).facts(exchange.replica().job_state()),
        "skipped": scalar(exchange.skipped_steps),
        "residuals": [float(np.sum(r)) for r in residuals],
        "magnitude": max(float(np.sum(np.abs(r))) for r in residuals),
        "told": [job[f"lgc_{name}"] for name in ("stage", "collected", "learning", "decoded")],
        "job": job,
    }


class Epochs(keras.callbacks.Callback):
    """Records the state after each epoch, and the phase after each step."""

    def __init__(self, exchange, checkpoint=None):
        super().__init__()
        self.exchange, self.checkpoint, self.seen, self.phases = exchange, checkpoint, [], []

    def on_train_batch_end(self, batch, logs=None):
        self.phases.append(logs["lgc_phase"])

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append({**seen(self.model, self.exchange), "log": logs["lgc_phase"]})
        if self.checkpoint:
            self.checkpoint.write(path_of(epoch, RANK))


def path_of(epoch, worker=0):
    return str(Path(argument(2), f"worker-{worker}", f"epoch-{epoch}"))


def fit(model, exchange, epochs, checkpoint=None, callbacks=()):
    watch = Epochs(exchange, checkpoint)
    training = gc.callbacks.AutoencoderTraining(learning_rate=0.02)
    model.fit(
        *data(),
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        shuffle=False,
        callbacks=[training, *callbacks, watch],
    )
    return {"epochs": watch.seen, "phases": watch.phases}


def train():
    way, pattern = argument(3), argument(4)
    several = {"steps_per_execution": 4} if way == "strategy" else {}
    model, exchange = built(way, pattern, **several)
    checkpoint = tf.train.Checkpoint(model=model, exchange=exchange)
    whole = fit(model, exchange, EPOCHS, checkpoint)
    traffic = exchange.traffic()
    tensors = sum(traffic.tensor_bytes.values())
    jobs = go_on(model, exchange, checkpoint) if way == "optimizer" else []
    report(
        {
            **whole,
            "payload": traffic.payload_bytes,
            "tensors": tensors,
            "jobs": jobs,
            "other weights": error_with_other_weights(model, exchange),
        }
    )


def error_with_other_weights(model, exchange):
    """Trains on where worker 1 has another autoencoder."""
    (weights,) = exchange.job_state["lgc_weights"].values
    if RANK == 1:
        weights.assign(weights + 1e-6)
    try:
        fit(model, exchange, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def go_on(model, exchange, checkpoint):
    """Resumes from the save of each phase, one after the other."""
    jobs = []
    for epoch in range(3):
        checkpoint.read(path_of(epoch)).assert_consumed()
        restored = seen(model, exchange)
        jobs.append({"restored": restored, **fit(model, exchange, EPOCHS - 1 - epoch)})
    return jobs


def resume():
    model, exchange = built("optimizer", "all_reduce")
    checkpoint = tf.train.Checkpoint(model=model, exchange=exchange)
    report({"jobs": go_on(model, exchange, checkpoint)})


class Killed(keras.callbacks.Callback):
    """Worker 1 is, before it can save what comes after a step: the job's steps are counted."""

    def on_train_batch_end(self, batch, logs=None):
        if RANK == 1 and scalar(self.model.optimizer.iterations) == int(argument(3)):
            os.kill(os.getpid(), signal.SIGKILL)


def backup():
    model, exchange = built("optimizer", "all_reduce")
    saved = gc.callbacks.BackupAndRestore(argument(2), delete_checkpoint=False)
    report(fit(model, exchange, EPOCHS, callbacks=[saved, Killed()]))


LARGEST = 160 * 32  # elements of a variable
ALIKE = ("weights", "slots", "phase", "facts", "skipped", "residuals", "told", "log")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def trained(folder):
    return results(run_workers(PROGRAM, 2, ["train", folder, "optimizer", "all_reduce"]))


@pytest.fixture(scope="module")
def by_strategy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    args = ["train", folder, "strategy", "parameter_server"]
    return results(run_workers(PROGRAM, 2, args))


@pytest.mark.parametrize("way", ["trained", "by_strategy"])
def test_all_workers_go_through_all_phases_together(way, request):
    chief, second = request.getfixturevalue(way)
    assert chief["phases"] == second["phases"] == sorted(chief["phases"])
    assert [epoch["log"] for epoch in chief["epochs"]] == [1, 2, 3, 3] or way == "by_strategy"
    assert chief["epochs"][-1]["log"] == 3
    for first, two in zip(chief["epochs"], second["epochs"], strict=True):
        for name in ALIKE:
            assert first[name] == two[name], name
    # In each epoch, and so in each phase, one step was skipped by all.
    assert [epoch["skipped"] for epoch in chief["epochs"]] == [1, 2, 3, 4]
    assert 0 < chief["tensors"] < chief["payload"]


def assert_resumes(job, saved):
    """The saved state is there again, and all phases that are left follow."""
    for name in ("weights", "phase", "skipped", "job"):
        assert job["restored"][name] == saved[name], name
    assert job["phases"] == sorted(job["phases"])
    assert job["epochs"][-1]["log"] == 3


@pytest.mark.parametrize("epoch", range(3))
def test_a_job_resumes_from_each_phase(trained, epoch):
    saved = trained[0]["epochs"][epoch]
    for worker in trained:
        job = worker["jobs"][epoch]
        assert_resumes(job, saved)
        assert job["phases"] == trained[0]["jobs"][epoch]["phases"]
        assert job["epochs"][-1]["weights"] == trained[0]["jobs"][epoch]["epochs"][-1]["weights"]
        assert job["epochs"][-1]["job"]["lgc_learned"] >= saved["job"]["lgc_learned"]
    assert trained[0]["jobs"][epoch]["restored"]["learnt"] == saved["learnt"]


def test_more_workers_resume_from_each_phase(trained, folder):
    resumed = results(run_workers(PROGRAM, 3, ["resume", folder]))
    for epoch in range(3):
        saved = trained[0]["epochs"][epoch]
        for worker in resumed:
            job = worker["jobs"][epoch]
            assert_resumes(job, saved)
            # A third of each residual, three times, and a sum over all of them.
            bound = rounding(saved["magnitude"], terms=3 + 1 + LARGEST)
            np.testing.assert_allclose(
                job["restored"]["residuals"], saved["residuals"], rtol=0, atol=bound
            )
            assert job["phases"] == resumed[0]["jobs"][epoch]["phases"]
            for one, two in zip(job["epochs"], resumed[0]["jobs"][epoch]["epochs"], strict=True):
                assert one["weights"] == two["weights"]
                assert one["told"] == two["told"]


def test_a_killed_job_resumes_from_its_last_epoch_with_more_workers(trained, tmp_path):
    """The autoencoder learns at that time; the tests above resume from the save of each phase."""
    whole, step = trained[0], 12
    assert whole["phases"][step - 1] == 2
    survivor, killed = run_workers(PROGRAM, 2, ["backup", tmp_path, step], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, None)
    assert "UnavailableError" in survivor.stderr
    workers = results(run_workers(PROGRAM, 3, ["backup", tmp_path, 0]))
    for worker in workers:
        assert worker["phases"] == workers[0]["phases"] == sorted(worker["phases"])
        assert len(worker["phases"]) == (EPOCHS - 1) * STEPS
        assert (worker["phases"][0], worker["phases"][-1]) == (whole["phases"][STEPS], 3)
        assert worker["epochs"][-1]["skipped"] == EPOCHS
        assert worker["epochs"][-1]["weights"] == workers[0]["epochs"][-1]["weights"]


@pytest.mark.parametrize("way", ["trained", "by_strategy"])
def test_a_worker_whose_autoencoder_is_another_one_is_found(way, request):
    for worker in request.getfixturevalue(way):
        assert "Error" in worker["other weights"]
        assert "no error" not in worker["other weights"]


if __name__ == "__main__":
    {"train": train, "resume": resume, "backup": backup}[argument(1)]()
