"""Trains by lossy methods, each worker on its own data; one step has a NaN.

methods.py OPTIMIZER:METHOD[:SETTING],... [METHOD OF THE STRATEGY]
"""

import sys

import numpy as np
import tensorflow as tf
from common import compiled, new_strategy, state_of
from optimizers import OPTIMIZERS, layer_optimizers

from tests.ranks import (
    BATCH,
    BY_HOROVOD,
    RANK,
    SIZE,
    argument,
    compressed,
    data,
    exchange_of,
    own_rows,
    report,
)
from tf_gradcomp.exchange.exchange import residual_norm

STEPS, BAD = 12, 5
OPTIMIZERS |= layer_optimizers()
SETTINGS = {"local": {"precondition": "local"}, "none": {"precondition": None}, "": {}}


def trained(case, strategy):
    name, method, setting = (case + "::").split(":")[:3]
    scaled = "mixed_float16" if setting == "scaled" else "float32"

    def make():
        inner = OPTIMIZERS[name]()
        return inner if by_strategy else compressed(inner, method, **SETTINGS.get(setting, {}))

    by_strategy = getattr(strategy, "compressor", None) is not None
    model = compiled(make, strategy, policy=scaled)
    exchange = exchange_of(model)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")

    def step(x, y, factor):
        with tf.GradientTape() as tape:
            loss = factor * loss_of(y, model(x, training=True)) / BATCH
            if BY_HOROVOD:
                loss *= SIZE
        model.optimizer.minimize(loss, model.trainable_variables, tape=tape)

    @tf.function(autograph=False)
    def run(x, y, factor):
        strategy.run(step, args=(x, y, factor))

    x, y = (own_rows(part).reshape(STEPS, BATCH // SIZE, -1) for part in data(STEPS))
    norms = []
    for i in range(STEPS):
        factor = np.nan if i == BAD and RANK == 0 else 1.0
        before = state_of(model)["weights"]
        run(x[i], y[i, :, 0], tf.constant(factor, tf.float32))
        if i == BAD:
            unchanged = before == state_of(model)["weights"]
        norms.append(residual_norm(exchange))
    seen = state_of(model)
    seen |= {"skipped": int(exchange.skipped_steps.numpy()), "unchanged": unchanged}
    if hasattr(model.optimizer, "loss_scale"):
        seen["scale"] = float(model.optimizer.loss_scale)
    return {**seen, "residual": norms[-1], "finite": bool(np.isfinite(norms).all())}


if __name__ == "__main__":
    strategy = new_strategy(compressor=sys.argv[2]) if len(sys.argv) > 2 else new_strategy()
    report({case: trained(case, strategy) for case in argument(1).split(",")})
