"""Rank 1 is late until a file is there, and kills itself later."""

import os
import signal
import time

import keras
from common import compiled, fit

from tests.ranks import RANK, argument, compressed, data


def die(batch, logs):
    if RANK == 1 and batch == 2:
        until = time.monotonic() + 120
        while not os.path.exists(argument()) and time.monotonic() < until:
            time.sleep(0.02)
    if RANK == 1 and batch == 4:
        os.kill(os.getpid(), signal.SIGKILL)


model = compiled(lambda: compressed(keras.optimizers.SGD(0.1)))
fit(model, *data(8), callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=die)])
