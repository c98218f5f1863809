"""Trains by L-GreCo, with a plan after each 6 steps, in epochs of 4: so epochs end amid a period.

lgreco.py killed FOLDER    by CompressedOptimizer, from the backup in FOLDER if there is one; worker
                           1 kills itself in the ninth step
lgreco.py resume FOLDER    the same to the end
lgreco.py strategy         by a compressor on the strategy, two steps in an execution; and then what
                           happens where worker 1 has another plan
"""

import os
import pathlib
import signal

import keras
import numpy as np
from common import Setup, digits, state_digest, state_sums

import tf_gradcomp as gc
from tests.ranks import RANK, argument, exchange_of, report
from tf_gradcomp.compressors.base import GRADIENT_SUM
from tf_gradcomp.compressors.lgreco import LayerPlanner

BATCH, STEPS, EPOCHS = 32, 4, 5
PERIOD, LAST_STEP = 6, 9
METHOD = "lgreco(method='top_k(density=0.05)')"
data = digits(BATCH * STEPS)


def layers():
    hidden = [keras.layers.Dense(width, activation="tanh") for width in (128, 32)]
    return keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(3)])


def built(way, **compile_args):
    setup = Setup(way, METHOD)
    model = setup.model(layers, lambda: setup.wrap(keras.optimizers.SGD(0.1)), **compile_args)
    if way == "optimizer":
        with setup.strategy.scope():
            model.optimizer.build(model.trainable_variables)
    return model, exchange_of(model)


def fit(model, *callbacks):
    plans = gc.callbacks.LayerwisePlan(PERIOD, table=False)
    return model.fit(
        *data,
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        shuffle=False,
        callbacks=[plans, *callbacks],
    )


def seen(model, exchange):
    """Returns a checkpoint's plan, and the plan that would be made now."""
    state = state_sums(exchange)
    sums = state[GRADIENT_SUM]
    return {
        **state_digest(model),
        "plan": exchange.hooks.plan_in_force(),
        "sums": sums,
        "next plan": exchange.hooks.get(LayerPlanner).propose(sums, exchange.job_state),
    }


class Epochs(keras.callbacks.Callback):
    """Records values at the beginning and after each epoch; kills worker 1 on request."""

    def __init__(self, exchange, dies=False):
        super().__init__()
        self.exchange, self.dies, self.steps, self.seen = exchange, dies, 0, []

    def on_train_begin(self, logs=None):
        self.restored = seen(self.model, self.exchange)

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append({**seen(self.model, self.exchange), "ratio": logs["plan_ratio"]})
        report({"restored": self.restored, "epochs": self.seen})

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.dies and RANK == 1 and self.steps == LAST_STEP:
            os.kill(os.getpid(), signal.SIGKILL)


def with_backup(dies):
    model, exchange = built("optimizer")
    backup = gc.callbacks.BackupAndRestore(pathlib.Path(argument(2)), delete_checkpoint=False)
    fit(model, backup, Epochs(exchange, dies))


def strategy():
    model, exchange = built("strategy", steps_per_execution=2)
    epochs = Epochs(exchange)
    fit(model, epochs)
    report(
        {
            "epochs": epochs.seen,
            "at the start": error_with_another_plan(*built("strategy")),
            "later": error_with_another_plan(model, exchange),
        }
    )


def error_with_another_plan(model, exchange):
    """Trains on where worker 1 has another plan, and so vectors of another length."""
    (plan,) = exchange.job_state["top_k_plan"].values
    settings = np.array(exchange.hooks.plan_in_force().settings)
    if RANK == 1:
        planner = exchange.hooks.get(LayerPlanner)
        choices = planner.lgreco.choices(planner.specs[2])
        settings[2] = next(choice for choice in choices if choice != settings[2])
    plan.assign(settings + 1)
    try:
        fit(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


if __name__ == "__main__":
    if argument(1) == "strategy":
        strategy()
    else:
        with_backup(dies=argument(1) == "killed")
