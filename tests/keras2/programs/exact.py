"""Trains with several optimizers in `fit`, dense; alone, one process does so on whole batches.

exact.py wrapped|strategy|alone OPTIMIZER[:METHOD],... [REPLICAS IN EACH WORKER]
"""

import sys

from common import ALONE, compiled, fit, new_strategy, state_of
from optimizers import OPTIMIZERS, layer_optimizers

import tf_gradcomp as gc
from tests.ranks import (
    BY_HOROVOD,
    RANK,
    argument,
    compressed,
    data,
    digest,
    exchange_of,
    report,
)
from tf_gradcomp.private import tensorflow as tf_private

STEPS = 8
BUILT_IN_STEP = ("EMA", "legacy loss scale", "LazyAdam")  # as where nobody builds the optimizer
OPTIMIZERS |= layer_optimizers()


def together(name, strategy):
    """Ranks of Horovod begin with different weights, and get rank 0's."""
    name, _, method = name.partition(":")

    def make():
        inner = OPTIMIZERS[name]()
        by_strategy = strategy is not ALONE and strategy.compressor is not None
        return inner if by_strategy else compressed(inner, method or "no_compression")

    model = compiled(make, strategy, seed=RANK if BY_HOROVOD else 0, in_step=name in BUILT_IN_STEP)
    callbacks = [gc.callbacks.BroadcastInitialState()]
    fit(model, *data(STEPS), callbacks=callbacks)
    replicas = zip(
        *map(strategy.experimental_local_results, model.trainable_variables), strict=True
    )
    return {
        **state_of(model),
        "residuals": digest(exchange_of(model).residuals),
        "replicas": [digest(variables) for variables in replicas],
    }


def alone(name):
    model = compiled(OPTIMIZERS[name], ALONE)
    fit(model, *data(STEPS))
    return state_of(model)


if __name__ == "__main__":
    way, names = argument(1), argument(2).split(",")
    if way == "alone":
        report({name: alone(name) for name in names})
    else:
        if len(sys.argv) > 3:
            tf_private.use_logical_cpus(int(argument(3)))
        strategy = new_strategy(**({"compressor": "no_compression"} if way == "strategy" else {}))
        report({name: together(name, strategy) for name in names})
