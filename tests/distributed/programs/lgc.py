"""Trains by LGC through all of its phases; in each epoch, a gradient of worker 1 is not finite.

lgc.py train FOLDER WAY PATTERN   saves after each epoch; then resumes from each of the first three
lgc.py resume FOLDER              resumes from these, in another job
lgc.py backup FOLDER STEP         resumes from its last epoch; in that step, worker 1 is killed
"""

import os
import pathlib
import signal

import keras
import numpy as np
import tensorflow as tf
from common import Setup, digits, residual_sums, scalar, state_digest

import tf_gradcomp as gc
from tests.ranks import RANK, SIZE, argument, exchange_of, report
from tf_gradcomp.compressors.lgc.job_state import AutoencoderHook
from tf_gradcomp.keras.callbacks.autoencoder_training import autoencoder_of

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
    return str(pathlib.Path(argument(2), f"worker-{worker}", f"epoch-{epoch}"))


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


if __name__ == "__main__":
    {"train": train, "resume": resume, "backup": backup}[argument(1)]()
