"""A gradient of worker 1 that is not finite, in each setting: WAY."""

import keras
import numpy as np
from common import (
    Setup,
    dense_model,
    digits,
    local_residuals,
    residual_sums,
    scalar,
    state_digest,
)

from tests.ranks import RANK, SIZE, argument, exchange_of, inner_of, report

BATCH, STEPS, BAD_STEP = 32, 6, 2
setup = Setup(argument(1))


def data():
    """With a NaN among the rows that worker 1 has in step `BAD_STEP`."""
    x, y = digits(BATCH * STEPS)
    x[BATCH * BAD_STEP + BATCH // SIZE] = np.nan
    return x, y


class Watch(keras.callbacks.Callback):
    """The state after each step."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        exchange = exchange_of(self.model)
        self.steps.append(
            {
                **state_digest(self.model),
                "finite": all(
                    np.all(np.isfinite(variable)) for variable in self.model.trainable_variables
                ),
                "skipped": scalar(exchange.skipped_steps),
                "iterations": scalar(inner_of(optimizer).iterations),
                "steps": scalar(inner_of(optimizer)._iterations),
                "scale": scale_of(optimizer),
                "residuals": local_residuals(exchange),
                "residual sums": residual_sums(exchange),
            }
        )


def scale_of(optimizer):
    for candidate in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if isinstance(candidate, keras.optimizers.LossScaleOptimizer):
            return scalar(candidate.dynamic_scale)
    return None


def train(optimizer, policy="float32"):
    x, y = data()
    model = setup.model(dense_model, optimizer, policy=policy)
    watch = Watch()
    model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, shuffle=False, callbacks=[watch])
    return watch.steps


def adam(**kwargs):
    return keras.optimizers.Adam(1e-2, **kwargs)


def scaler(inner):
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10)


CHECKS = {
    "plain": lambda: train(lambda: setup.wrap(adam())),
    "mixed_float16": lambda: train(lambda: setup.wrap(adam()), "mixed_float16"),
}
if setup.way == "optimizer":
    CHECKS |= {
        "loss scaler around": lambda: train(lambda: scaler(setup.wrap(adam()))),
        "loss scaler inside": lambda: train(lambda: setup.wrap(scaler(adam()))),
        "accumulation": lambda: train(lambda: setup.wrap(adam(gradient_accumulation_steps=2))),
    }

if __name__ == "__main__":
    seen = {}
    for name, check in CHECKS.items():
        print(name, flush=True)
        seen[name] = check()
    report({**seen, "rank": RANK})
