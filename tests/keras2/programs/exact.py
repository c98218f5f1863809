"""Trains dense with several optimizers in `fit`, and on the first worker also alone.

exact.py wrapped|strategy OPTIMIZER...
"""

from common import ALONE, compiled, fit, new_strategy, state_of
from optimizers import OPTIMIZERS, of_layers

import tf_gradcomp as gc
from tests.ranks import BY_HOROVOD, RANK, argument, compressed, data, report

STEPS = 8
OPTIMIZERS |= of_layers()


def together(name, strategy):
    """Ranks of Horovod begin with other weights, and are given those of rank 0."""

    def make():
        inner = OPTIMIZERS[name]()
        by_strategy = strategy is not ALONE and strategy.compressor is not None
        return inner if by_strategy else compressed(inner, "no_compression")

    model = compiled(make, strategy, seed=RANK if BY_HOROVOD else 0)
    callbacks = [gc.callbacks.BroadcastInitialState()]
    fit(model, *data(STEPS), callbacks=callbacks)
    return state_of(model)


def alone(name):
    model = compiled(OPTIMIZERS[name], ALONE)
    fit_alone(model)
    return state_of(model)


def fit_alone(model):
    x, y = data(STEPS)
    model.fit(x, y, batch_size=24, shuffle=False, verbose=0)


if __name__ == "__main__":
    by_strategy = argument(1) == "strategy"
    strategy = new_strategy(compressor="no_compression") if by_strategy else new_strategy()
    seen = {"together": {name: together(name, strategy) for name in argument(2).split(",")}}
    if RANK == 0:
        seen["alone"] = {name: alone(name) for name in argument(2).split(",")}
    report(seen)
