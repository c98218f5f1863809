"""Trains; one worker stops for some seconds in the second epoch."""

import os
import subprocess
import sys

import keras
from common import Setup, dense_model, digits

from tests.ranks import RANK, digest, report


class Pause(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        paused, seconds = sys.argv[1:]
        if epoch == 1 and int(paused) == RANK:
            stop = f"kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
            subprocess.run(["sh", "-c", stop], check=True)


setup = Setup("optimizer", "top_k(density=0.1)")
model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.Adam(0.01)))
model.fit(*digits(640), batch_size=16, epochs=4, verbose=0, callbacks=[Pause()])
report([digest(value) for value in model.get_weights()])
