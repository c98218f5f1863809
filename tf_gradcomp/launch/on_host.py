"""Runs on a host of a job: checks whether workers can start there, or runs and watches a worker.

The launcher sends the text of this file to the host's Python by ssh, so this file imports only the
standard library. The first line on stdin is the launcher's request, as JSON. After that, stdin
carries the numbers of signals for the worker, and zeros as signs of life. This program
kills the worker when stdin ends or falls silent, so that no worker survives a lost connection.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import IO, Any

MARK = b"\x1e"  # before and after each message for the launcher
SILENCE = 60.0  # seconds without a sign of life
_POLL = 0.1  # seconds between two looks at the worker


def main() -> None:
    """Carries out the request on the first line of stdin."""
    control = os.fdopen(0, "rb", 0)
    request = json.loads(control.readline())
    if request["do"] == "survey":
        _send(1, {"problem": _problem(request), "ports": _free_ports(request["workers"])})
    else:
        _run(request, control)


def _send(fd: int, message: dict[str, Any]) -> None:
    os.write(fd, MARK + json.dumps(message).encode() + MARK)


def _problem(request: dict[str, Any]) -> str:
    """Returns the reason why the program cannot run here; empty if it can."""
    folder = request["folder"]
    if not os.path.isdir(folder):
        return f"there is no folder {folder}"
    os.chdir(folder)
    sys.path[:0] = [folder, *request["python_path"]]
    for module in filter(None, ("tf_gradcomp", request["module"])):
        if not _is_module(module):
            return f"{sys.executable} has no module {module}"
    program = request["program"]
    if program and not any(map(os.path.isfile, (program, os.path.join(program, "__main__.py")))):
        return f"there is no program {program} in {folder}"
    return ""


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # its package does not exist
        return False


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _run(request: dict[str, Any], control: IO[bytes]) -> None:
    """Runs a worker, and reports its end on stderr."""
    os.chdir(request["folder"])
    guarded = [sys.executable, "-I", "-S", "-c", request["guard"], str(os.getpid())]
    process = subprocess.Popen(
        [*guarded, *request["command"]],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **request["env"]},
        start_new_session=True,
    )
    last_sign = time.monotonic()
    # The ended worker stays unreaped, so that no other process group gets its id.
    while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if select.select([control], [], [], _POLL)[0]:
            line = control.readline()
            last_sign = time.monotonic() if line else -SILENCE
            if order := int(line or 0):
                os.killpg(process.pid, order)
        if time.monotonic() > last_sign + SILENCE:  # the launcher cannot be reached
            os.killpg(process.pid, signal.SIGKILL)
            return
    os.killpg(process.pid, signal.SIGKILL)
    _send(2, {"returncode": process.wait()})


if __name__ == "__main__":
    main()
