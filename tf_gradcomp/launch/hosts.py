"""Surveys the hosts of a job, and prepares the commands that start workers there by ssh."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tf_gradcomp.launch.job import GUARD
from tf_gradcomp.launch.remote_worker import LOADER, MessageSplitter, program_text
from tf_gradcomp.tf_config import VARIABLE as TF_CONFIG
from tf_gradcomp.tf_config import make_tf_config

_SSH = (
    "ssh",
    "-T",
    "-oBatchMode=yes",  # a password prompt would block the job
    "-oConnectTimeout=20",
    "-oServerAliveInterval=15",
    "-oServerAliveCountMax=4",
)
_LONGEST_SURVEY = 60.0  # seconds
_HOST = re.compile(r"(?P<name>(?:[^\s@]+@)?(?:\[[^\]]+\]|[^\s:@\[\]]+))(?::(?P<workers>\d+))?")
_NO_COMMAND = (126, 127)  # exit codes of a shell


@dataclasses.dataclass(frozen=True)
class Host:
    """A host of a job."""

    name: str  # as ssh knows it
    workers: int
    address: str  # as the other hosts know it
    is_local: bool  # this machine needs no ssh

    @property
    def connect(self) -> list[str]:
        """Returns the command that runs `LOADER` with this Python's path on the host."""
        command = [sys.executable, "-P", "-c", LOADER]  # without modules of the folder
        if self.is_local:
            return command
        return [*_SSH, self.name, f"exec {shlex.join(command)}"]


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
    addresses = [_address_of(name) for name in workers]
    hosts = [
        Host(name, number, address, _is_local(address))
        for (name, number), address in zip(workers.items(), addresses, strict=True)
    ]
    unknown = [host.name for host in hosts if _is_loopback(host.address)]
    if unknown and len(unknown) < len(hosts):
        raise ValueError(
            f"{unknown[0]} is another machine on each host; give this machine the name by which "
            "the other hosts reach it"
        )
    return hosts


def _address_of(name: str) -> str:
    """Returns the name or IP address of a host, according to the user's ssh configuration."""
    plain = name.rpartition("@")[2]
    command = ["ssh", "-G", name.strip("[]")]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        found = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
        plain = found[1] if found else plain
    return f"[{plain}]" if ":" in plain and not plain.startswith("[") else plain


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "[::1]") or address.startswith("127.")


def _is_local(address: str) -> bool:
    host = address.strip("[]")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as one:
            one.bind(place)  # Linux binds only to the machine's own addresses
    except OSError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Placed:
    """The workers of a job, each with its host and an address that was free there."""

    hosts: Sequence[Host]  # one for each worker
    addresses: Sequence[str]
    folder: str
    forward: Sequence[str]  # environment variables that workers inherit from the launcher

    def env(self) -> list[dict[str, str]]:
        """Returns each worker's environment variables."""
        workers = range(len(self.addresses))
        return [{TF_CONFIG: make_tf_config(self.addresses, worker)} for worker in workers]

    def prefixes(self, forward: Sequence[str]) -> list[list[str]]:
        """Returns the command that runs each worker's command on its host.

        Args:
            forward: More environment variables that workers inherit from the launcher.
        """
        prefixes = []
        for host in self.hosts:
            place = {
                "host": host.name,
                "connect": host.connect,
                "folder": self.folder,
                "forward": [*self.forward, *forward],
                "guard": GUARD,
            }
            main = "from tf_gradcomp.launch.remote_worker import main; main()"
            prefixes.append([sys.executable, "-P", "-c", main, json.dumps(place)])
        return prefixes


def place_workers(
    hosts: Sequence[Host],
    program: str,
    *,
    module: bool,
    forward: Sequence[str],
    env: Mapping[str, str] = os.environ,
) -> Placed:
    """Checks that all hosts can run the program, and gives each worker an address.

    Args:
        hosts: The hosts.
        program: The path of the program, or the name of its module.
        module: Whether `program` is the name of a module.
        forward: Environment variables that workers inherit from the launcher.
        env: The launcher's environment variables.

    Raises:
        RuntimeError: If hosts cannot run the program; names them and their problems.
    """
    path = env.get("PYTHONPATH", "") if "PYTHONPATH" in forward else ""
    folder = os.getcwd()
    request = {
        "do": "survey",
        "folder": folder,
        "program": None if module else program,
        "module": program if module else None,
        "python_path": path.split(os.pathsep) if path else [],
    }
    answers = _query(hosts, request)
    problems = [
        f"{host.name}: {answer['problem']}"
        for host, answer in zip(hosts, answers, strict=True)
        if answer["problem"]
    ]
    if problems:
        raise RuntimeError("\n".join(["workers cannot be started on", *problems]))
    workers = [
        (host, f"{host.address}:{port}")
        for host, answer in zip(hosts, answers, strict=True)
        for port in answer["ports"]
    ]
    return Placed(
        [host for host, _ in workers], [address for _, address in workers], folder, forward
    )


def _query(hosts: Sequence[Host], request: dict[str, Any]) -> list[dict[str, Any]]:
    """Queries all hosts at the same time; returns each host's problem, or its free ports."""
    with contextlib.ExitStack() as stack:
        queries = [stack.enter_context(_HostQuery(host, request)) for host in hosts]
        until = time.monotonic() + _LONGEST_SURVEY
        return [one.answer(until) for one in queries]


class _HostQuery:
    """A query to a host; the end of its context ends the connection."""

    def __init__(self, host: Host, request: dict[str, Any]) -> None:
        self._query = program_text() + json.dumps({**request, "workers": host.workers}).encode()
        self._client = host.connect[0]
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(FileNotFoundError):
            self._process = subprocess.Popen(
                host.connect,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )

    def __enter__(self) -> _HostQuery:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def answer(self, until: float) -> dict[str, Any]:
        """Returns the host's answer; waits for it until the time `until`."""
        if self._process is None:
            return {"problem": f"there is no {self._client} here"}
        try:
            output, errors = self._process.communicate(
                self._query + b"\n", max(0, until - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            return {"problem": f"no answer within {_LONGEST_SURVEY:g} seconds"}
        _, answers = MessageSplitter().feed(output)
        if answers:
            return answers[0]
        if self._process.returncode in _NO_COMMAND:
            return {"problem": f"there is no Python at {sys.executable}, as there is here"}
        lines = errors.decode(errors="replace").strip().splitlines()
        return {"problem": lines[-1] if lines else f"exit code {self._process.returncode}"}
