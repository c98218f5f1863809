"""Tests `gradcomp run -H` on hosts with separate addresses, by a real `sshd`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.sshd import needs_sshd, running_sshd
from tests.cli.test_run import COMMAND, ENV, program  # noqa: F401

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import links

WHY_NOT = links.missing()


def run_on_hosts(folder, *args):
    """Runs a program on this host, the first of two, and on the other one by ssh."""
    folder.mkdir()
    with links.network(2) as network:
        here, there = network.hosts
        with running_sshd(folder, f"{network.name}-1") as client:
            (folder / "ssh").write_text(f'#!/bin/sh\nexec {client} "$@"\n')
            (folder / "ssh").chmod(0o755)
            command = ["ip", "netns", "exec", f"{network.name}-0", *COMMAND]
            done = subprocess.run(
                [*command, "run", "-H", f"{here},root@{there}", "-x", "PYTHONPATH", *args],
                env={**ENV, "PATH": f"{folder}{os.pathsep}{ENV['PATH']}"},
                capture_output=True,
                text=True,
                timeout=500,
                check=False,
            )
    return done, there


MEETING = """
import socket
addresses = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
host, port = addresses[1].split(":")
if index == 1:
    with socket.create_server((host, int(port))) as server:
        server.accept()[0].sendall(b"hello from " + host.encode())
else:
    while True:
        try:
            with socket.create_connection((host, int(port))) as other:
                print(other.makefile().read())
                break
        except ConnectionRefusedError:
            time.sleep(0.05)
"""


@needs_sshd
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_workers_on_hosts_reach_each_other(program, tmp_path):  # noqa: F811
    done, there = run_on_hosts(tmp_path / "bin", program(MEETING))
    assert done.stdout == f"[worker 0] hello from {there}\n", done.stderr
    assert done.returncode == 0
