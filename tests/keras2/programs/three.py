"""Runs three workers that resume from a job of two, get advice, report differences, and lose one.

three.py FOLDER [PART]
"""

import os
import signal
import sys

import tensorflow as tf
from common import compiled, fit, keras, new_strategy, state_of, words_model
from optimizers import OPTIMIZERS
from saves import loaded, saved, seen

import tf_gradcomp as gc
from tests.ranks import RANK, SIZE, argument, compressed, data, report

SAVED_BY_FIRST = os.path.join(argument(1), "rank0", "Adam.checkpoint-1")


def make_adam():
    return compressed(OPTIMIZERS["Adam"](), "adacomp(bin_sizes=10)")


def dense(strategy):
    model = compiled(lambda: compressed(OPTIMIZERS["Adam"](), "no_compression"), strategy)
    fit(model, *data(8))
    return state_of(model)


def alone():
    model = compiled(OPTIMIZERS["Adam"], tf.distribute.get_strategy())
    fit(model, *data(8))
    return state_of(model)


def two(strategy):
    model = compiled(make_adam, strategy)
    fit(model, *data(4))
    before = seen(model)
    saved(model, "Adam", "checkpoint")
    return before


def gone_on_with(strategy):
    model = loaded(SAVED_BY_FIRST, "checkpoint", make_adam, strategy)
    restored = seen(model)
    fit(model, *data(4, seed=2))
    return {"restored": restored, "later": state_of(model)}


def chosen(strategy):
    model = compiled(lambda: compressed(keras.optimizers.Adam(1e-2), "auto"), strategy)
    fit(model, *data(4))
    return {"method": repr(model.optimizer.exchange.compressor), **state_of(model)}


def advised(strategy):
    model = compiled(make_adam, strategy)
    with strategy.scope():
        advice = gc.advise(model, ["adacomp", "scalecom"], compute_seconds=0.01)
    return [prediction.method for prediction in advice.predictions if prediction.step > 0.01]


def larger_model():
    return keras.Sequential([*words_model().layers[:-1], keras.layers.Dense(4)])


def told(strategy):
    build = larger_model if RANK == 1 else words_model
    try:
        fit(compiled(make_adam, strategy, build=build), *data(1))
    except gc.WorkersDisagreeError as error:
        return str(error)
    return None


class Dies(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2 and RANK == 2:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    strategy = new_strategy() if SIZE > 1 else tf.distribute.get_strategy()
    if SIZE == 1:
        report(alone())
    elif SIZE == 2:
        os.makedirs(os.path.join(argument(1), f"rank{RANK}"))
        report(two(strategy))
    else:
        parts = [dense, gone_on_with, chosen, advised, told]
        if len(sys.argv) > 2:
            report({argument(2): globals()[argument(2)](strategy)})
            sys.exit()
        report({part.__name__: part(strategy) for part in parts})
        fit(compiled(make_adam, strategy), *data(8), callbacks=[Dies()])
