"""Trains as a pod that may be lost: FOLDER dies|lives. Pod 0 dies once in an epoch, 1 in the next.

A pod finds the others by names, which it looks up in the file HOSTS in place of /etc/hosts.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

import keras
from common import Setup, dense_model, digits

import tf_gradcomp as gc
from tests.pods import HOSTS
from tests.ranks import RANK, report, values

FOLDER, DIES = Path(sys.argv[1]), sys.argv[2] == "dies"
_NEW_NAMESPACE, _BIND, _PRIVATE = 0x20000, 0x1000, 0x4000 | 0x40000  # recursively


def look_up_in(hosts):
    """Puts a file in place of /etc/hosts, for this process alone; before it has any threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    for done in (
        lambda: libc.unshare(_NEW_NAMESPACE),
        lambda: libc.mount(None, b"/", None, _PRIVATE, None),
        lambda: libc.mount(os.fsencode(hosts), b"/etc/hosts", None, _BIND, None),
    ):
        if done():
            raise OSError(ctypes.get_errno(), "cannot replace /etc/hosts")


if HOSTS in os.environ:
    look_up_in(os.environ[HOSTS])


class Die(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        marker = FOLDER / f"died-{RANK}"
        if DIES and epoch == 1 + RANK and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


setup = Setup("optimizer", "no_compression")
model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.Adam(0.01)))
callbacks = [gc.callbacks.BackupAndRestore(FOLDER / "backup"), Die()]
model.fit(*digits(640), batch_size=16, epochs=4, verbose=0, shuffle=False, callbacks=callbacks)
report(values(model.get_weights()))
