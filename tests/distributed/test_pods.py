"""Pods that are lost come back, with other addresses, and all pods train on.

Each pod is restarted separately, as under a TFJob. When a pod is lost, the other pods end, restart,
and wait for it.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import pytest

import tf_gradcomp as gc
from tests import pods
from tests.distributed.common import Setup, dense_model, digits
from tests.pods import HOSTS
from tests.ranks import RANK, report, values
from tests.workers import result, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
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


class Die(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        marker = FOLDER / f"died-{RANK}"
        if DIES and epoch == 1 + RANK and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


BACKOFF, DEADLINE = 0.2, 300.0  # seconds
KILLED = 137


class Names:
    """The file in which pods look up each other."""

    def __init__(self, file, names):
        self.file, self._names, self._addresses = file, names, ["127.0.0.1"] * len(names)
        self._write()

    def move(self, index, address):
        if self._addresses[index] != address:
            self._addresses[index] = address
            self._write()

    def _write(self):
        # Not a new file, which would not be seen in the place of /etc/hosts.
        pairs = zip(self._addresses, self._names, strict=True)
        self.file.write_text("".join(f"{' '.join(pair)}\n" for pair in pairs))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give processes their own names")
def test_pods_train_on_when_each_is_lost_once_and_returns_with_another_address(tmp_path):
    environments, hosts, ports = pods.on_own_ports(pods.tfjob_environments("tfjob.yaml")[1])
    names = Names(tmp_path / "hosts", hosts)
    with contextlib.ExitStack() as stack:
        stack.callback(ports.release)
        running = []
        for index, env in enumerate(environments):
            local = {pods.HOSTS: str(names.file), "RESULT_PATH": str(tmp_path / f"worker{index}")}
            pod = pods.Pod([str(PROGRAM), str(tmp_path), "dies"], {**env, **local}, BACKOFF)
            running.append(stack.enter_context(contextlib.closing(pod)))
        until = time.monotonic() + DEADLINE
        while not all(pod.is_complete for pod in running):
            assert time.monotonic() < until, [pod.output[-20:] for pod in running]
            for index, pod in enumerate(running):
                pod.step()
                if any(end.exit_code == KILLED for end in pod.ends):
                    names.move(index, f"127.0.0.{2 + index}")
    for pod in running:
        codes = [end.exit_code for end in pod.ends]
        assert codes.count(KILLED) == 1
        assert len(codes) <= 5, codes  # no crash loop: a start for each loss, and few too early
    (tmp_path / "undisturbed").mkdir()
    undisturbed = run_workers(PROGRAM, 2, [tmp_path / "undisturbed", "lives"])
    for index, worker in enumerate(undisturbed):
        assert json.loads((tmp_path / f"worker{index}.json").read_text()) == result(worker)


if __name__ == "__main__":
    FOLDER, DIES = Path(sys.argv[1]), sys.argv[2] == "dies"
    if HOSTS in os.environ:
        look_up_in(os.environ[HOSTS])
    setup = Setup("optimizer", "no_compression")
    model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.Adam(0.01)))
    callbacks = [gc.callbacks.BackupAndRestore(FOLDER / "backup"), Die()]
    model.fit(*digits(640), batch_size=16, epochs=4, verbose=0, shuffle=False, callbacks=callbacks)
    report(values(model.get_weights()))
