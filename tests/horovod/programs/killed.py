"""Rank 1 kills itself."""

import os
import signal

import keras
from common import compiled, fit

from tests.ranks import RANK, compressed, data


def die(batch, logs):
    if RANK == 1 and batch == 4:
        os.kill(os.getpid(), signal.SIGKILL)


model = compiled(lambda: compressed(keras.optimizers.SGD(0.1)))
fit(model, *data(8), callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=die)])
