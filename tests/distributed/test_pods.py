"""A pod that is lost comes back, with another address, and all pods train on.

Each pod is started again by itself, as under a TFJob: the others lose the pod, end, and wait for it
in their next start.
"""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest

from tests import pods
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs/pods.py"
BACKOFF, AWAY, DEADLINE = 0.2, 1.0, 240.0  # seconds
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give processes their own names")


@pytest.fixture(scope="module")
def without_a_loss(tmp_path_factory):
    return result(run_workers(PROGRAM, 2, [tmp_path_factory.mktemp("none"), -1])[0])


class Names:
    """The file in which pods look up each other."""

    def __init__(self, file, names):
        self.file, self._addresses = file, dict.fromkeys(names, "127.0.0.1")
        self._write()

    def move(self, name, address):
        if self._addresses[name] != address:
            self._addresses[name] = address
            self._write()

    def _write(self):
        # Not a new file, which would not be seen in the place of /etc/hosts.
        lines = [f"{address} {name}\n" for name, address in self._addresses.items()]
        self.file.write_text("127.0.0.1 localhost\n" + "".join(lines))


@root
@pytest.mark.parametrize("lost", [0, 1])
def test_pods_train_on_when_one_returns_with_another_address(tmp_path, without_a_loss, lost):
    environments, hosts, ports = pods.on_own_ports(pods.of_tfjob("tfjob.yaml")[1])
    names = Names(tmp_path / "hosts", hosts)
    with contextlib.ExitStack() as stack:
        stack.callback(ports.release)
        running = []
        for index, env in enumerate(environments):
            own = {pods.HOSTS: str(names.file), "RESULT_PATH": str(tmp_path / f"worker{index}")}
            backoff = AWAY if index == lost else BACKOFF
            pod = pods.Pod([str(PROGRAM), str(tmp_path), str(lost)], {**env, **own}, backoff)
            running.append(stack.enter_context(contextlib.closing(pod)))
        until = time.monotonic() + DEADLINE
        while not all(pod.is_complete for pod in running):
            assert time.monotonic() < until, [pod.output[-20:] for pod in running]
            for pod in running:
                pod.step()
            if running[lost].ends:
                names.move(hosts[lost], "127.0.0.2")
    codes = [[end.exit_code for end in pod.ends] for pod in running]
    assert codes[lost] == [137, 0]
    assert codes[1 - lost] == [1, 0]  # it waits for the other in its second start
    for index in range(len(running)):
        assert json.loads((tmp_path / f"worker{index}.json").read_text()) == without_a_loss
