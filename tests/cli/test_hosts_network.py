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

from tests.cli.test_run import COMMAND, ENV, preloaded_gradcomp, program  # noqa: F401

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

REJOINS = """
import pathlib, signal, time
folder, lost, epochs = pathlib.Path(sys.argv[1]), sys.argv[2] == "lost", int(sys.argv[3])
workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
print("runs", index, "of", len(workers), file=sys.stderr)
import keras, numpy as np
import tf_gradcomp as gc

strategy = gc.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4)])
    optimizer = gc.CompressedOptimizer(keras.optimizers.Adam(0.01), "top_k(density=0.1)")
    model.compile(optimizer, "mse")


class Play(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if lost and len(workers) == 2 and index == 1 and epoch == 1:
            place = folder / "lost/training_metadata.json"  # the last file of the chief's backup
            while not place.exists() or not place.read_text().endswith("}"):
                time.sleep(0.02)
            (folder / "bin/away").touch()
            os.kill(os.getppid(), signal.SIGKILL)  # what runs it on its host
            time.sleep(60)

    def on_epoch_end(self, epoch, logs=None):
        print("loss", epoch, logs["loss"])
        while lost and len(workers) == 1 and not os.path.exists(os.environ["GRADCOMP_REGROUP"]):
            time.sleep(0.02)  # until gradcomp has found the host


x = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
backup = gc.callbacks.BackupAndRestore(folder / sys.argv[2], delete_checkpoint=False)
model.fit(
    x, x[:, :4], batch_size=12, epochs=epochs, verbose=0, shuffle=False, callbacks=[Play(), backup]
)
residuals = [np.asarray(total).tolist() for total in model.optimizer.exchange.residuals]
print("end", [value.tolist() for value in model.get_weights()], residuals)
"""


@contextlib.contextmanager
def played(folder, namespace):
    """A program in place of `ssh`, which enters a network namespace."""
    inside = f"exec ip netns exec {namespace} env -i PATH=$PATH HOME=$HOME sh -c"
    yield f"""
        [ -e {folder}/away ] && rm {folder}/away && echo refused >&2 && exit 255
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


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_job_whose_host_is_lost_and_returns_trains_as_resumed_jobs_do(program, tmp_path):  # noqa: F811
    path = program(REJOINS)
    options = ["--output", "chief", "--grace", "0.2", "--max-restarts", "1", "--min-workers", "1"]
    given = [path, str(tmp_path), "lost", "4"]
    done, there = run_on_hosts(tmp_path / "bin", played, *options, *given)
    assert done.returncode == 0, done.stderr
    runs = [line for line in done.stderr.splitlines() if line.startswith("[worker 0] runs")]
    assert runs == [f"[worker 0] runs 0 of {workers}" for workers in (2, 1, 2)]
    assert f"root@{there}: the connection was lost" in done.stderr
    assert "start again, which does not count as a restart, with 2 of 2 workers" in done.stderr
    *losses, end = done.stdout.splitlines()
    resumed = []  # jobs of so many workers, until so many epochs are trained
    for workers, epochs in (("2", "1"), ("1", "2"), ("2", "4")):
        by_hand = [path, str(tmp_path), "by_hand", epochs]
        job = preloaded_gradcomp("run", "-n", workers, "--output", "chief", *by_hand)
        assert job.returncode == 0, job.stderr
        resumed += job.stdout.splitlines()
    assert losses == [line for line in resumed if " loss " in line]
    assert len(losses) == 4
    assert end == resumed[-1]
