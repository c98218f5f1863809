"""Rank 1 kills itself amid training; reports how long rank 0 then took to end with an error."""

import os
import signal
import time

import keras
from common import compiled, fit

from tests.ranks import RANK, compressed, data, report

alive = time.perf_counter()


def note(batch, logs):
    global alive
    alive = time.perf_counter()
    if RANK == 1 and batch == 3:
        os.kill(os.getpid(), signal.SIGKILL)


model = compiled(lambda: compressed(keras.optimizers.SGD(0.1)))
try:
    fit(model, *data(8), callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=note)])
finally:
    report(time.perf_counter() - alive)
