"""Pods that are lost come back, with other addresses, and all pods train on.

Each pod is restarted separately, as under a TFJob. When a pod is lost, the other pods end, restart,
and wait for it.
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
