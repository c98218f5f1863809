"""Starts workers on hosts by ssh, by one connection for each worker.

A connection first reports a free port of the host. Once all ports are known, it gets the worker's
command, and then the numbers of signals for the worker. The worker ends when its connection ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tf_gradcomp.launch.processes import start_process

_SSH = (
    "ssh",
    "-T",
    "-oBatchMode=yes",  # a password prompt would block the job
    "-oConnectTimeout=20",
    "-oServerAliveInterval=15",
    "-oServerAliveCountMax=4",
)
_LONGEST_LOGIN, _LAST_WORDS = 60.0, 5.0  # seconds
_HOST = re.compile(r"(?P<name>(?:[^\s@]+@)?(?:\[[^\]]+\]|[^\s:@\[\]]+))(?::(?P<workers>\d+))?")
_PORT = re.compile(rb"^gradcomp (\d+)\n", re.MULTILINE)  # after the output of login scripts

# The host's Python reads this program from stdin, so that no shell has to quote anything. The port
# stays bound, so that no other process gets it: see `ReservedPorts`. Negative numbers are signals
# for the whole process group. The output passes through this program: sshd would wait for other
# processes that keep it open, such as a service that the worker has started.
_ON_HOST = """
import ctypes, json, os, signal, socket, subprocess, sys, threading
for path in needed_paths:
    if not os.path.exists(path):
        sys.exit(f"there is no {path}")
reserved = socket.socket()
reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
reserved.bind(("", 0))
print("gradcomp", reserved.getsockname()[1], flush=True)
request = json.loads(sys.stdin.readline() or sys.exit())
worker = subprocess.Popen(
    request["command"],
    cwd=request["folder"],
    env={**os.environ, **request["env"]},
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    bufsize=0,
    start_new_session=True,
    preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG
)
def pass_signals():
    for line in sys.stdin:
        number = int(line)
        os.kill(worker.pid, number) if number > 0 else os.killpg(worker.pid, -number)
    os.killpg(worker.pid, signal.SIGKILL)
def pass_output(pipe, fd):
    while chunk := pipe.read(65536):
        while chunk:
            chunk = chunk[os.write(fd, chunk) :]
def start(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread
start(pass_signals)
outputs = [start(pass_output, worker.stdout, 1), start(pass_output, worker.stderr, 2)]
os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
os.killpg(worker.pid, signal.SIGKILL)  # what the worker has started
for output in outputs:
    output.join(5)
code = worker.wait()
os._exit(code if code >= 0 else 128 - code)
"""


@dataclass(frozen=True)
class Host:
    """A host of a job."""

    name: str  # as ssh knows it
    workers: int
    address: str  # as the other hosts know it
    is_local: bool  # this machine needs no ssh


def parse_hosts(text: str) -> list[Host]:
    """Parses `host1,user@host2:2`: names that ssh knows, with the number of workers on each.

    Raises:
        ValueError: If the text has another form, or if other hosts cannot reach this machine by the
            name in it.
    """
    workers: dict[str, int] = {}
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        if match is None or match["workers"] == "0":
            raise ValueError(
                f"expected hosts and numbers of workers, such as host1,host2:2; received {part!r}"
            )
        workers[match["name"]] = workers.get(match["name"], 0) + int(match["workers"] or 1)
    addresses = {name: _address_of(name) for name in workers}
    loopback = [
        name
        for name, address in addresses.items()
        if address in ("localhost", "[::1]") or address.startswith("127.")
    ]
    if 0 < len(loopback) < len(workers):
        raise ValueError(
            f"{loopback[0]} is another machine on each host; give this machine the name by which "
            "the other hosts reach it"
        )
    return [
        Host(name, worker_count, addresses[name], _is_local(addresses[name]))
        for name, worker_count in workers.items()
    ]


def _address_of(name: str) -> str:
    """Returns the name or IP address of a host, according to the user's ssh configuration."""
    address = name.rpartition("@")[2]
    with contextlib.suppress(OSError):
        shown = subprocess.run(
            ["ssh", "-G", name.strip("[]")],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        found = re.search(r"^hostname (\S+)$", shown.stdout, re.MULTILINE)
        address = found[1] if found else address
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _is_local(address: str) -> bool:
    try:
        family, kind, protocol, _, socket_address = socket.getaddrinfo(
            address.strip("[]"), 0, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as bound:
            bound.bind(socket_address)  # Linux binds only to the machine's own addresses
    except OSError:
        return False
    return True


class Connection:
    """A connection to a host, for one worker.

    Args:
        host: The host.
        needed_paths: Files and folders without which no worker can start.
    """

    def __init__(self, host: Host, needed_paths: Sequence[str]) -> None:
        self.host = host
        self.address = ""  # of the worker; known after `log_in`
        command = [sys.executable, "-I", "-S", "-c", "exec(input())"]
        if not host.is_local:
            command = [*_SSH, host.name, f"exec {shlex.join(command)}"]
        self.process = start_process(command, os.environ, stdin=subprocess.PIPE)
        self._send(f"needed_paths = {list(needed_paths)!a}; exec({_ON_HOST!a})")

    def log_in(self, until: float) -> list[str]:
        """Waits for the worker's address until a time; returns the lines of an error, if any."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        answer, fd = b"", self.process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while not (port := _PORT.search(answer)):
            if not poll.poll(1000 * max(0.0, until - time.monotonic())):
                return [f"no answer within {_LONGEST_LOGIN:g} seconds"]
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                return self._error()
            answer += chunk
        self.address = f"{self.host.address}:{int(port[1])}"
        os.set_blocking(self.process.stderr.fileno(), False)
        self.process.stderr.read()  # the host's welcome
        return []

    def _error(self) -> list[str]:
        try:
            _, errors = self.process.communicate(timeout=_LAST_WORDS)
        except subprocess.TimeoutExpired:
            return ["the connection was closed"]
        lines = errors.decode(errors="replace").splitlines()
        said = [line for line in lines if line.strip()]
        return said or [f"exit code {self.process.returncode}"]

    def start_worker(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts the worker in a folder with the path of this one, with more variables."""
        request = {"command": [*command], "folder": os.getcwd(), "env": dict(env)}
        self._send(json.dumps(request))

    def send_signal(self, signum: int, *, to_group: bool) -> None:
        """Sends a signal to the worker alone, or also to all processes that it has started."""
        self._send(str(-signum if to_group else signum))

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        data = f"{line}\n".encode()
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self.process.stdin.fileno(), data) :]


@contextlib.contextmanager
def connected(hosts: Sequence[Host], needed_paths: Sequence[str]) -> Iterator[list[Connection]]:
    """The connections for the workers on all hosts, which end with this context.

    Raises:
        ConnectionError: If workers cannot be started on some hosts; names them and the reasons.
    """
    if not all(host.is_local for host in hosts) and not shutil.which("ssh"):
        raise ConnectionError("there is no ssh on this machine")
    connections: dict[Host, list[Connection]] = {host: [] for host in hosts}
    try:
        # One login after the other on each host: sshd refuses several at once (MaxStartups).
        for index in range(max(host.workers for host in hosts)):
            opened = [Connection(host, needed_paths) for host in hosts if index < host.workers]
            for connection in opened:
                connections[connection.host].append(connection)
            until = time.monotonic() + _LONGEST_LOGIN
            problems = [
                f"{connection.host.name}: {line}"
                for connection in opened
                for line in connection.log_in(until)
            ]
            if problems:
                raise ConnectionError("\n".join(["workers cannot be started on", *problems]))
        yield [connection for host in hosts for connection in connections[host]]
    finally:
        for connection in (connection for host in hosts for connection in connections[host]):
            with connection.process:  # which closes its pipes
                connection.process.kill()


def take_file(host: Host, path: str) -> str | None:
    """Reads a text file on a host, and removes it; None if it is not there.

    Raises:
        ConnectionError: If the host cannot be reached.
    """
    name = shlex.quote(path)
    command = ["sh", "-c", f"[ ! -e {name} ] || (cat {name} && rm {name})"]
    if not host.is_local:
        command = [*_SSH, host.name, shlex.join(command)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise ConnectionError(f"{host.name}: {path} cannot be read: {done.stderr.strip()}")
    return done.stdout or None
