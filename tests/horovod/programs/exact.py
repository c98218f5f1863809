"""Trains dense by Horovod with several optimizers in `fit`, and on rank 0 also alone.

exact.py OPTIMIZER...
"""

import keras
from common import compiled, fit, state_of

import tf_gradcomp as gc
from tests.ranks import RANK, SIZE, argument, compressed, data, report

STEPS = 8
EPSILON = 0.05  # of Adam, for `tests.bounds.training`
OPTIMIZERS = {
    "sums": lambda: keras.optimizers.SGD(0.1),  # by ranks in steps that are as many times shorter
    "AdamW": lambda: keras.optimizers.AdamW(1e-2, epsilon=EPSILON),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "EMA": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=16
    ),
}


def optimizer_of_rank(name):
    if name == "sums":
        return compressed(keras.optimizers.SGD(0.1 / SIZE), "no_compression", reduction="sum")
    return compressed(OPTIMIZERS[name](), "no_compression")


def by_horovod(name):
    """Ranks begin with different weights, and get rank 0's."""
    model = compiled(lambda: optimizer_of_rank(name), seed=RANK)
    callbacks = [gc.callbacks.BroadcastInitialState()]
    fit(model, *data(STEPS), callbacks=callbacks)
    return {**state_of(model), "iterations": int(model.optimizer.iterations)}


def alone(name):
    model = compiled(OPTIMIZERS[name], seed=0)
    model.optimizer.build(model.trainable_variables)  # else the first step would be traced twice
    model.fit(*data(STEPS), batch_size=24, shuffle=False, verbose=0)
    return {**state_of(model), "iterations": int(model.optimizer.iterations)}


if __name__ == "__main__":
    names = argument(1).split(",")
    seen = {"by Horovod": {name: by_horovod(name) for name in names}}
    if RANK == 0:
        seen["alone"] = {name: alone(name) for name in names}
    report(seen)
