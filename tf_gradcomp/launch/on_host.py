"""Runs on a host of a job: looks whether workers can start there, or runs one and watches it.

The text of this file is sent to that host's Python by ssh, so it imports the standard library only.
What it is to do comes as one line of JSON on stdin. After that, stdin carries the numbers of
signals for the worker, and zeros as signs of life. The worker is killed when stdin ends or falls
silent, so that none is left when the connection is lost.
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
import tempfile
import time
from typing import IO, Any

MARK = b"\x1e"  # around what is for the launcher and not for the user
SILENCE = 60.0  # seconds without a sign of life
_TURN = 0.1  # seconds between two looks at the worker


def main() -> None:
    """Does what the first line on stdin says."""
    control = os.fdopen(0, "rb", 0)
    told = json.loads(control.readline())
    if told["do"] == "survey":
        _tell(1, {"problem": _problem(told), "ports": _free_ports(told["workers"])})
    else:
        _run(told, control)


def _tell(fd: int, what: dict[str, Any]) -> None:
    os.write(fd, MARK + json.dumps(what).encode() + MARK)


def _problem(told: dict[str, Any]) -> str:
    """Says why the program cannot be run here; empty if it can."""
    folder = told["folder"]
    if not os.path.isdir(folder):
        return f"there is no folder {folder}"
    os.chdir(folder)
    sys.path[:0] = [folder, *told["python_path"]]
    for module in filter(None, ("tf_gradcomp", told["module"])):
        if not _is_module(module):
            return f"{sys.executable} has no module {module}"
    program = told["program"]
    if program and not any(map(os.path.isfile, (program, os.path.join(program, "__main__.py")))):
        return f"there is no program {program} in {folder}"
    return ""


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of the package that it would be in
        return False


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _run(told: dict[str, Any], control: IO[bytes]) -> None:
    """Runs a worker, and tells of its saves and of its end on stderr."""
    os.chdir(told["folder"])
    with tempfile.NamedTemporaryFile(prefix="gradcomp-saves-") as saves:
        env = {**os.environ, **told["env"]}
        if told["saves_as"]:
            env[told["saves_as"]] = saves.name
        guarded = [sys.executable, "-I", "-S", "-c", told["guard"], str(os.getpid())]
        process = subprocess.Popen(
            [*guarded, *told["command"]],
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        saved, heard = 0, time.monotonic()
        # It stays unreaped, so that the group is nobody else's.
        while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if select.select([control], [], [], _TURN)[0]:
                line = control.readline()
                heard = time.monotonic() if line else -SILENCE
                if int(line or 0):
                    os.killpg(process.pid, int(line))
            if time.monotonic() > heard + SILENCE:  # nobody hears of its end
                os.killpg(process.pid, signal.SIGKILL)
                return
            saved = _tell_saves(saves.name, saved)
        os.killpg(process.pid, signal.SIGKILL)
        _tell_saves(saves.name, saved)
        _tell(2, {"returncode": process.wait()})


def _tell_saves(path: str, told: int) -> int:
    saved = os.stat(path).st_size
    if saved > told:
        _tell(2, {"saves": saved - told})
    return saved


if __name__ == "__main__":
    main()
