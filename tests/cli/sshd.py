"""A real `sshd` for tests, with keys and a configuration of its own."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
needs_sshd = pytest.mark.skipif(
    not SSHD, reason="There is no sshd here; Debian has it in openssh-server."
)


@contextlib.contextmanager
def running_sshd(folder, namespace=None):
    """Yields the shell command of a client that gets in, without its arguments.

    The server listens at port 22 of a network namespace; or here, as each of the hosts that the
    client is asked for, except `stranger`, which refuses its key. It refuses several logins at
    once.
    """
    for name in ("host_key", "key", "other_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    port = 22 if namespace else free_port()
    (folder / "sshd_config").write_text(
        f"Port {port}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
        "MaxStartups 2:100:2\nAcceptEnv HOST\n"
    )
    here = "" if namespace else f"Hostname 127.0.0.1\nPort {port}\n"
    (folder / "config").write_text(
        f"Host stranger\nIdentityFile {folder}/other_key\n"
        f"Host * !stranger\nIdentityFile {folder}/key\n"
        f"Host *\n{here}IdentitiesOnly yes\nUserKnownHostsFile {folder}/known\n"
        "StrictHostKeyChecking accept-new\n"
        "Host host1\nSetEnv HOST=host1\nHost host2\nSetEnv HOST=host2\n"
    )
    key = (folder / "host_key.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key}")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    inside = ["ip", "netns", "exec", namespace] if namespace else []
    command = [*inside, SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
    with (
        open(folder / "sshd_log", "w") as log,
        subprocess.Popen(command, stderr=log) as server,
    ):
        try:
            until = time.monotonic() + 60
            while "Server listening" not in (folder / "sshd_log").read_text():
                assert time.monotonic() < until, (folder / "sshd_log").read_text()
                time.sleep(0.05)
            yield f"{shutil.which('ssh')} -F {folder}/config"
        finally:
            server.terminate()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
