"""Trains with Keras' own callbacks, and dies while it saves: FOLDER STAGE.

Each job resumes from the files of the jobs before, and trains for one epoch; the first job trains
for two. The job then dies at the given stage of the next save. At stage "none" it ends before it
trains.
"""

import json
import os
import pathlib
import resource
import signal
import sys

import keras
from common import Setup, dense_model, digits, residual_sums, scalar, state_digest

from tests.ranks import RANK, argument, exchange_of, report
from tf_gradcomp.exchange import saving

FOLDER, STAGE = pathlib.Path(argument(1)), argument(2)
WEIGHTS = "latest.weights.h5"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def before(module, name, where=lambda *_: True, act=die):
    """Has a function die before it does its work; `where` is asked with its arguments."""
    original = getattr(module, name)

    def dying(*args, **kwargs):
        if where(*args):
            act(*args)
        return original(*args, **kwargs)

    setattr(module, name, dying)


def truncate_and_die(descriptor):
    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
    die()


def rename_and_die(source, to):
    os.rename(source, to)
    die()


def is_written(descriptor):
    return WEIGHTS in os.readlink(f"/proc/self/fd/{descriptor}")


def is_complete(_, to):
    return to.endswith(WEIGHTS)


def arm():
    if STAGE == "before collecting" and RANK == 1:
        before(saving.Saving, "collect")
    if STAGE == "collecting" and RANK == 1:
        before(saving, "_totals")
    if STAGE == "writing" and RANK == 0:
        before(os, "fsync", is_written, truncate_and_die)
    if STAGE == "before renaming" and RANK == 0:
        before(os, "replace", is_complete)
    if STAGE == "after renaming" and RANK == 0:
        before(os, "replace", is_complete, rename_and_die)
    if STAGE == "disk is full" and RANK == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))


class Watch(keras.callbacks.Callback):
    """Comes first, and records the values that will be saved."""

    def on_epoch_begin(self, epoch, logs=None):
        if not hasattr(self, "first"):  # Keras restores in `on_train_begin`, after this callback
            self.first = epoch
            report({"epoch": epoch, **self.state()})
            if STAGE == "none":
                sys.exit()

    def on_epoch_end(self, epoch, logs=None):
        state = self.state()
        if RANK == 0:
            (FOLDER / f"{epoch + 1}.json").write_text(json.dumps({"epoch": epoch + 1, **state}))
        if epoch == max(self.first, 1):
            arm()

    def state(self):
        sums = residual_sums(exchange_of(self.model))
        return {
            **state_digest(self.model),
            "iterations": scalar(self.model.optimizer.iterations),
            "residual sums": [total.tolist() for total in sums],
        }


setup = Setup("optimizer")
x, y = digits(48)
model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.Adam(1e-2)))
with setup.strategy.scope():
    model.optimizer.build(model.trainable_variables)
callbacks = [
    Watch(),
    keras.callbacks.ModelCheckpoint(FOLDER / "m.keras"),
    keras.callbacks.BackupAndRestore(FOLDER / "backup", delete_checkpoint=False),
]
model.fit(x, y, batch_size=24, epochs=20, verbose=0, callbacks=callbacks)
