"""Trains with each compression method; a gradient of worker 1 is not finite in one step."""

import functools

import keras
import numpy as np
from common import (
    RANK,
    WORKERS,
    Setup,
    dense_model,
    digits,
    exchange_of,
    report,
    scalar,
    state_digest,
)

from tf_gradcomp import compressors

BATCH, STEPS, BAD_STEP = 32, 8, 3


def data():
    x, y = digits(BATCH * STEPS)
    x[BATCH * BAD_STEP + BATCH // WORKERS] = np.nan
    return x, y


def train(compressor):
    setup = Setup("optimizer", compressor)
    model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.SGD(0.1)))
    before = model.evaluate(*digits(BATCH * STEPS), verbose=0)
    model.fit(*data(), batch_size=BATCH, verbose=0, shuffle=False)
    exchange = exchange_of(setup, model)
    traffic = exchange.traffic()
    return {
        **state_digest(model),
        "improved": model.evaluate(*digits(BATCH * STEPS), verbose=0) < before,
        "values": [np.asarray(variable) for variable in model.trainable_variables],
        "skipped": scalar(exchange.skipped_steps),
        "payload bytes": traffic.payload_bytes / traffic.exchanges,
        "sent bytes": traffic.sent_bytes / traffic.exchanges,
        "dense bytes": traffic.dense_bytes / traffic.exchanges,
        "tensor bytes": sum(traffic.tensor_bytes.values()) / traffic.exchanges,
    }


if __name__ == "__main__":
    methods = {name: functools.partial(train, name) for name in compressors.names()}
    methods["bfloat16"] = functools.partial(train, compressors.Cast("bfloat16"))
    warmed_up = compressors.ScaleCom(20, warmup_steps=BAD_STEP + 2)
    methods["warmed up"] = functools.partial(train, warmed_up)
    report({"rank": RANK, **{name: run() for name, run in methods.items()}})
