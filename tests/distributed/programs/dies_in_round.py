"""Trains in rounds of four local steps; worker 1 kills itself after the sixth step."""

import os
import signal

import keras
from common import Setup, dense_model, digits

from tests.ranks import RANK

DEATH = 6


class Die(keras.callbacks.Callback):
    """Kills worker 1 within its second round."""

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == DEATH and RANK == 1:
            assert self.model.optimizer.rounds.pending
            os.kill(os.getpid(), signal.SIGKILL)


setup = Setup("optimizer", "no_compression")
model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.SGD(0.1), local_steps=4))
model.fit(*digits(320), batch_size=32, verbose=0, callbacks=[Die()])
