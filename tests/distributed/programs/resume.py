"""Trains with BackupAndRestore: FOLDER EPOCHS. Says when an epoch has ended."""

import keras
import numpy as np
from common import (
    Setup,
    dense_model,
    digits,
    local_residuals,
    residual_sums,
    say,
    scalar,
    state_digest,
    state_sums,
)

import tf_gradcomp as gc
from tests.ranks import SIZE, argument, exchange_of, inner_of, report

FOLDER, EPOCHS = argument(1), int(argument(2))


class Watch(keras.callbacks.Callback):
    """Comes after BackupAndRestore, records the restored values, and reports the saved values."""

    def __init__(self):
        super().__init__()
        self.epochs = []
        self.restored = None
        self.after_first_step = None

    def sums(self):
        return residual_sums(exchange_of(self.model))

    def second_moments(self):
        return state_sums(exchange_of(self.model))["second_moment"]

    def on_train_begin(self, logs=None):
        self.restored = {
            "residual sums": self.sums(),
            "second moments": self.second_moments(),
            **state_digest(self.model),
        }

    def on_train_batch_end(self, batch, logs=None):
        if self.after_first_step is None:
            self.after_first_step = [
                float(np.abs(residual).max())
                for residual in local_residuals(exchange_of(self.model))
            ]

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)
        report_now(self)
        say(f"epoch {epoch} ended")


def report_now(watch):
    report(
        {
            "epochs": watch.epochs,
            "restored": watch.restored,
            "after first step": watch.after_first_step,
            "residual sums": watch.sums(),
            "second moments": watch.second_moments(),
            "own second moments": [
                np.asarray(v)
                for v in inner_of(watch.model.optimizer).variables
                if "velocity" in v.path
            ],
            "iterations": scalar(inner_of(watch.model.optimizer).iterations),
            **state_digest(watch.model),
        }
    )


setup = Setup("optimizer")
x, y = digits(96)
model = setup.model(
    dense_model, lambda: setup.wrap(keras.optimizers.Adam(1e-2), precondition="auto")
)
callbacks = [gc.callbacks.BackupAndRestore(FOLDER, delete_checkpoint=False), Watch()]
say(f"{SIZE} workers")
model.fit(x, y, batch_size=24, epochs=EPOCHS, verbose=0, callbacks=callbacks)
