"""Trains with compression methods, a gradient of worker 1 not finite in one step.

methods.py train FOLDER     with each in turn, with a backup after the epoch
methods.py killed METHOD    until worker 1 kills itself
methods.py resume FOLDER METHOD ...    with each of these in turn, from where its backup was made
"""

import os
import pathlib
import signal
import sys

import keras
import numpy as np
from common import (
    Setup,
    classification_loss,
    dense_model,
    digits,
    scalar,
    state_digest,
    state_sums,
)

import tf_gradcomp as gc
from tests.ranks import RANK, SIZE, argument, exchange_of, report
from tf_gradcomp import compressors

BATCH, STEPS, BAD_STEP = 32, 8, 3


def data():
    x, y = digits(BATCH * STEPS)
    x[BATCH * BAD_STEP + BATCH // SIZE] = np.nan
    return x, y


METHODS = {
    **{name: name for name in compressors.names()},
    "bfloat16": compressors.Cast("bfloat16"),
    "warmed up": compressors.ScaleCom(20, value_bits=16, warmup_steps=BAD_STEP + 2),
    "arc_top_k": compressors.ArcTopK(0.2, rank=2, block=8),
    "alternating": compressors.PowerSGD(2, alternate=True),
}


def built(name):
    setup = Setup("optimizer", METHODS[name])
    model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.SGD(0.1)))
    with setup.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model, exchange_of(model)


def values(model):
    return [np.asarray(variable) for variable in model.trainable_variables]


def loss(model):
    x, y = digits(BATCH * STEPS)
    return float(classification_loss()(y, model(x)))


def train(folder, name):
    model, exchange = built(name)
    before = loss(model)
    model.fit(*data(), batch_size=BATCH, verbose=0, shuffle=False, callbacks=[backup(folder, name)])
    traffic = exchange.traffic()
    return {
        **state_digest(model),
        "improved": loss(model) < before,
        "values": values(model),
        "state": state_sums(exchange),
        "skipped": scalar(exchange.skipped_steps),
        "payload bytes": traffic.payload_bytes / traffic.exchanges,
        "sent bytes": traffic.sent_bytes / traffic.exchanges,
        "dense bytes": traffic.dense_bytes / traffic.exchanges,
        "tensor bytes": sum(traffic.tensor_bytes.values()) / traffic.exchanges,
    }


def killed(name):
    model, _ = built(name)

    def die(batch, logs):
        if RANK == 1 and batch == BAD_STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    death = keras.callbacks.LambdaCallback(on_train_batch_end=die)
    model.fit(*data(), batch_size=BATCH, verbose=0, shuffle=False, callbacks=[death])


def backup(folder, name):
    return gc.callbacks.BackupAndRestore(pathlib.Path(folder, name), delete_checkpoint=False)


def resume(folder, name):
    model, exchange = built(name)
    restored = {}

    def note_restored(logs):
        restored.update(
            {
                "values": values(model),
                "state": state_sums(exchange),
                "weights before": state_digest(model)["weights"],
            }
        )

    watch = keras.callbacks.LambdaCallback(on_train_begin=note_restored)
    fitted = model.fit(
        *digits(BATCH * STEPS),
        batch_size=3 * BATCH // 2,
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=[backup(folder, name), watch],
    )
    return {
        **restored,
        **state_digest(model),
        "epochs": fitted.epoch,
        "skipped": scalar(exchange.skipped_steps),
    }


if __name__ == "__main__":
    mode = argument(1)
    if mode == "killed":
        killed(argument(2))
    elif mode == "train":
        report({name: train(argument(2), name) for name in METHODS})
    else:
        report({name: resume(argument(2), name) for name in sys.argv[3:]})
