"""Trains with each method, a gradient of worker 1 not finite in one step: train|resume FOLDER."""

import pathlib

import keras
import numpy as np
from common import (
    RANK,
    WORKERS,
    Setup,
    argument,
    dense_model,
    digits,
    exchange_of,
    report,
    scalar,
    state_digest,
    state_sums,
)

import tf_gradcomp as gc
from tf_gradcomp import compressors

BATCH, STEPS, BAD_STEP = 32, 8, 3


def data():
    x, y = digits(BATCH * STEPS)
    x[BATCH * BAD_STEP + BATCH // WORKERS] = np.nan
    return x, y


METHODS = {
    **{name: name for name in compressors.names()},
    "bfloat16": compressors.Cast("bfloat16"),
    "warmed up": compressors.ScaleCom(20, warmup_steps=BAD_STEP + 2),
}
FOLDER = pathlib.Path(argument(2))


def built(name):
    setup = Setup("optimizer", METHODS[name])
    model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.SGD(0.1)))
    with setup.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model, exchange_of(setup, model)


def values(model):
    return [np.asarray(variable) for variable in model.trainable_variables]


def train(name):
    model, exchange = built(name)
    before = model.evaluate(*digits(BATCH * STEPS), verbose=0)
    model.fit(*data(), batch_size=BATCH, verbose=0, shuffle=False)
    model.save_weights(gc.worker_path(FOLDER / f"{name}.weights.h5"))
    traffic = exchange.traffic()
    return {
        **state_digest(model),
        "improved": model.evaluate(*digits(BATCH * STEPS), verbose=0) < before,
        "values": values(model),
        "state": state_sums(exchange),
        "skipped": scalar(exchange.skipped_steps),
        "payload bytes": traffic.payload_bytes / traffic.exchanges,
        "sent bytes": traffic.sent_bytes / traffic.exchanges,
        "dense bytes": traffic.dense_bytes / traffic.exchanges,
        "tensor bytes": sum(traffic.tensor_bytes.values()) / traffic.exchanges,
    }


def resume(name):
    model, exchange = built(name)
    model.load_weights(FOLDER / f"{name}.weights.h5")
    restored = {"values": values(model), "state": state_sums(exchange)}
    x, y = digits(BATCH * STEPS)
    model.fit(x, y, batch_size=3 * BATCH // 2, verbose=0, shuffle=False)
    return {**restored, **state_digest(model), "skipped": scalar(exchange.skipped_steps)}


if __name__ == "__main__":
    check = {"train": train, "resume": resume}[argument(1)]
    report({"rank": RANK, **{name: check(name) for name in METHODS}})
