"""Trains workers by gossip, in training loops on given gradients and in `fit`: FOLDER."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from common import Setup, classification_loss, scalar
from local_training import RATE, Trained, gradients

import tf_gradcomp as gc
from tests.ranks import RANK, argument, digest, exchange_of, report, values

FOLDER = argument(1)


def trained(settings, *args, **kwargs):
    make = settings if callable(settings) else lambda: settings
    return Trained("adacomp", make, *args, **kwargs)


def on_a_ring():
    job = trained(gc.Gossip("ring", rank=1))
    seen = [job.on([step]).seen()["values"] for step in gradients(5)]
    traffic = job.optimizer.exchange.traffic()
    job.optimizer.synchronize()
    equal = job.seen()
    job.on(gradients(1, seed=9))
    unequal = job.seen()["values"]
    job.optimizer.synchronize()
    return {
        "seen": seen,
        "payload bytes": traffic.payload_bytes,
        "exchanges": traffic.exchanges,
        "equal": equal,
        "unequal": unequal,
        "end": job.seen(),
    }


def whole(**kwargs):
    """Gossip of whole weights, in which a worker's mean has halves and quarters."""
    return gc.Gossip("ring", rank=None, diffusion=0.75, **kwargs)


def with_outer():
    """Takes rounds of two steps with outer momentum; worker 1 has a NaN in round 2."""
    outer = lambda: keras.optimizers.SGD(0.5, momentum=0.5)  # noqa: E731
    job = trained(lambda: whole(steps=2, outer=outer()))
    steps = gradients(6)
    steps[3][1][0][0, 0] = np.nan
    return job.on(steps).seen()


def overflows():
    """Has the weights and the momentum of worker 1 overflow in the second of two rounds."""
    steps = gradients(2)
    steps[1][1][1][0] = 1e38
    inner = lambda: keras.optimizers.SGD(4.0, momentum=0.5)  # noqa: E731
    return trained(whole(), inner).on(steps).seen()


def accumulates():
    inner = lambda: keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)  # noqa: E731
    return trained(whole(), inner).on(gradients(4)).seen()


def scaled():
    """Trains inside a loss scaler: worker 1 overflows once, and halves its own scale."""
    steps = gradients(2)
    steps[1][1][0][0, 0] = np.inf
    around = lambda inner: keras.optimizers.LossScaleOptimizer(inner, 8.0)  # noqa: E731
    job = trained(whole(), scaler=around).on(steps)
    return {**job.seen(), "scale": scalar(job.applies.dynamic_scale)}


def warms_up():
    """Takes two steps by a method with residuals, and then one step of gossip."""
    settings = whole(warmup_steps=2)
    job = Trained("top_k(density=0.1)", lambda: settings)
    warm = job.on(gradients(3)[:2]).seen()
    return {"warm": warm, "end": job.on(gradients(3)[2:]).seen()}


def saves():
    """Saves on all workers while their weights differ; the job continues like a restored job."""
    make = lambda: whole()  # noqa: E731
    job = trained(make()).on(gradients(3))
    unequal = job.seen()["values"]
    path = job.checkpoint().write(f"{FOLDER}/worker_{RANK}/gossip")
    second = trained(make()).on(gradients(2, seed=9))
    second.checkpoint().read(path)
    synchronous = Trained("top_k", lambda: None)
    synchronous.checkpoint().read(path)
    rounds = Trained("top_k", lambda: 2).on(gradients(2))
    path = rounds.checkpoint().write(f"{FOLDER}/worker_{RANK}/rounds")
    try:
        second.checkpoint().read(path)
        refused = None
    except ValueError as error:
        refused = str(error)
    jobs = {"saved": job, "restored": second, "synchronous": synchronous}
    seen = {name: first.seen()["values"] for name, first in jobs.items()}
    return {"unequal": unequal, "refused": refused, **seen}


def disagree():
    try:
        trained(gc.Gossip("ring", rank=1 + (RANK == 1)))
    except gc.WorkersDisagreeError as error:
        return str(error)
    return None


class Seen(keras.callbacks.Callback):
    """Digests of the weights after each step, and of all variables at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.steps, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(digest(self.model.trainable_variables))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(digest(self.model.variables))


def in_fit():
    setup = Setup("optimizer", "adacomp")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 8)).astype("float32")
    y = (x @ rng.normal(size=(8, 3))).argmax(1).astype("int32")
    layers = lambda: [  # noqa: E731
        keras.layers.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(momentum=0.5),
        keras.layers.Dense(3),
    ]
    model = setup.model(
        lambda: keras.Sequential(layers()),
        lambda: setup.wrap(keras.optimizers.SGD(0.3), local_steps=gc.Gossip("ring")),
        loss=classification_loss(),
        metrics=["accuracy"],
    )
    seen = Seen()
    monitor = gc.callbacks.CompressionMonitor(table=False)
    settings = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0}
    logs = model.fit(x, y, callbacks=[monitor, seen], validation_data=(x, y), **settings)
    return {
        "steps": seen.steps,
        "epochs": seen.epochs,
        "logs": logs.history,
        "values": values(model.trainable_variables),
        "evaluated": model.evaluate(x, y, batch_size=32, verbose=0),
        "exchanges": exchange_of(model).exchanges,
    }


if __name__ == "__main__":
    checks = (
        *(on_a_ring, with_outer, overflows, accumulates, scaled, warms_up, saves),
        *(disagree, in_fit),
    )
    report({check.__name__: check() for check in checks})
