"""Tests `gradcomp run -H` on hosts with separate addresses, by a real `sshd` if there is one."""

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.cli.test_run import COMMAND, ENV, program  # noqa: F401

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import links

WHY_NOT = links.missing()
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
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


@contextlib.contextmanager
def played(folder, namespace):
    """A program in place of `ssh`, which enters a network namespace."""
    inside = f"exec ip netns exec {namespace} env -i PATH=$PATH HOME=$HOME sh -c"
    yield f"""
        [ "$1" = -G ] && exec echo hostname "${{2#*@}}"
        while [ $# -gt 1 ]; do shift; done
        {inside} "$1"
    """


@contextlib.contextmanager
def real(folder, namespace):
    """Returns the real `ssh`, with its own key and server."""
    for name in ("host_key", "key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\n"
        f"UsePAM no\nPidFile none\nPermitRootLogin yes\n"
    )
    (folder / "config").write_text(
        f"IdentityFile {folder}/key\nUserKnownHostsFile {folder}/known\n"
        "StrictHostKeyChecking accept-new\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    inside = ["ip", "netns", "exec", namespace]
    command = [*inside, SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            listening = ["ss", "-Hltn", "sport = :22"]
            until = time.monotonic() + 60
            while not subprocess.run([*inside, *listening], capture_output=True).stdout:
                assert time.monotonic() < until
                time.sleep(0.05)
            yield f'exec {shutil.which("ssh")} -F {folder}/config "$@"'
        finally:
            server.terminate()


def run_on_hosts(folder, by, *args):
    """Runs a program on this host, the first of two, and on the other one by ssh."""
    folder.mkdir()
    with links.network(2) as network:
        here, there = network.hosts
        with by(folder, f"{network.name}-1") as ssh:
            (folder / "ssh").write_text(f"#!/bin/sh\n{textwrap.dedent(ssh)}")
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


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize(
    "by",
    [
        played,
        pytest.param(
            real,
            marks=pytest.mark.skipif(
                not SSHD, reason="There is no sshd here; Debian has it in openssh-server."
            ),
        ),
    ],
)
def test_workers_on_hosts_reach_each_other(program, tmp_path, by):  # noqa: F811
    done, there = run_on_hosts(tmp_path / "bin", by, program(MEETING))
    assert done.stdout == f"[worker 0] hello from {there}\n", done.stderr
    assert done.returncode == 0
