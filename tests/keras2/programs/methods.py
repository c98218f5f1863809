"""Trains by methods that lose something, each worker on its own data; one step has a NaN.

methods.py OPTIMIZER:METHOD[:SETTING]...
"""

import numpy as np
import tensorflow as tf
from common import (
    BATCH,
    RANK,
    SIZE,
    argument,
    compiled,
    compressed,
    data,
    new_strategy,
    own_rows,
    report,
    state_of,
)
from optimizers import OPTIMIZERS

import tf_gradcomp as gc

STEPS, BAD = 12, 5
SETTINGS = {"local": {"precondition": "local"}, "none": {"precondition": None}, "": {}}


def trained(case, strategy):
    name, method, setting = (case + "::").split(":")[:3]
    scaled = "mixed_float16" if setting == "scaled" else "float32"

    def make():
        return compressed(OPTIMIZERS[name](), method, **SETTINGS.get(setting, {}))

    model = compiled(make, strategy, policy=scaled)
    optimizer = model.optimizer
    while not isinstance(optimizer, gc.CompressedOptimizer):
        optimizer = optimizer.inner_optimizer
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")

    def step(x, y, factor):
        with tf.GradientTape() as tape:
            loss = factor * loss_of(y, model(x, training=True)) / BATCH
            if optimizer.group.size == SIZE and not optimizer.group.loss_is_divided:
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
        norms.append(optimizer.exchange.residual_norm())
    seen = state_of(model)
    seen |= {"skipped": int(optimizer.exchange.skipped_steps.numpy()), "unchanged": unchanged}
    if model.optimizer is not optimizer:
        seen["scale"] = float(model.optimizer.loss_scale)
    return {**seen, "residual": norms[-1], "finite": bool(np.isfinite(norms).all())}


if __name__ == "__main__":
    strategy = new_strategy()
    report({case: trained(case, strategy) for case in argument(1).split(",")})
