"""Represents a worker on another host: forwards its output, its signals and its exit code."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_gradcomp.environment import PREFIX
from tf_gradcomp.launch import on_host
from tf_gradcomp.launch.job import PASSED_SIGNALS
from tf_gradcomp.tf_config import VARIABLE as TF_CONFIG

_SIGN_OF_LIFE = on_host.SILENCE / 6  # seconds
_TURN = 1.0  # seconds between two looks at the launcher's orders
_LAST_OUTPUT = 5.0  # seconds in which ssh forwards the rest of the output
_CHUNK = 1 << 16
_LOST = 255  # ssh's exit code for a lost connection
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
# The host's Python runs this. The program comes by stdin, so that no shell has to quote it.
LOADER = 'import os,json;exec(json.loads(os.fdopen(os.dup(0),"rb",0).readline()))'


def program_text() -> bytes:
    """Returns the line that `LOADER` reads."""
    text = Path(on_host.__file__).read_text()
    return json.dumps(text).encode() + b"\n"


class MessageSplitter:
    """Separates messages for the launcher from the output of a worker."""

    def __init__(self) -> None:
        self._open = b""

    def feed(self, chunk: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """Takes a chunk of a host's stream; returns the output and the messages in it."""
        parts = (self._open + chunk).split(on_host.MARK)
        self._open = b""
        if len(parts) % 2 == 0:  # the last mark is still open
            self._open = on_host.MARK + parts.pop()
        return b"".join(parts[::2]), [json.loads(message) for message in parts[1::2]]


class RemoteWorker:
    """A worker on a host.

    Args:
        host: The name of the host, for messages.
        connect: The command that runs `LOADER` there.
        request: The request for `on_host`.
    """

    def __init__(self, host: str, connect: Sequence[str], request: dict[str, Any]) -> None:
        self._host = host
        self._returncode: int | None = None
        self._process = subprocess.Popen(
            connect,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # so that a Ctrl-C does not end ssh
            preexec_fn=_end_with_parent,
        )
        self._send(program_text() + json.dumps(request).encode() + b"\n")

    def pass_signal(self, signum: int, _frame: object = None) -> None:
        """Sends a signal to the worker and all its child processes; 0 is a sign of life."""
        self._send(b"%d\n" % signum)

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(data)

    def run(self) -> int:
        """Forwards the worker's stderr until the worker ends; returns the exit code as `Popen`."""
        assert self._process.stderr is not None
        fd, splitter, alive = self._process.stderr.fileno(), MessageSplitter(), time.monotonic()
        while self._returncode is None:
            ended = self._process.poll() is not None
            if select.select([fd], [], [], 0 if ended else _TURN)[0]:
                chunk = os.read(fd, _CHUNK)
                if not chunk:
                    break
                output, messages = splitter.feed(chunk)
                _write(output)
                for message in messages:
                    self._returncode = message["returncode"]
            elif ended:
                break
            if time.monotonic() > alive + _SIGN_OF_LIFE:
                alive = time.monotonic()
                self.pass_signal(0)
        if self._returncode is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # ssh may stay connected
                self._process.wait(_LAST_OUTPUT)
            return self._returncode
        code = self._process.wait()
        print(f"{self._host}: the connection was lost (exit code {code})", file=sys.stderr)
        return _LOST


def _write(output: bytes) -> None:
    while output:
        output = output[os.write(2, output) :]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)


def _end_as(returncode: int) -> None:
    """Ends this process as the worker ended: with the same exit code, or by the same signal."""
    if returncode < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-returncode, signal.SIG_DFL)
        os.kill(os.getpid(), -returncode)
    sys.exit(returncode)


def main() -> None:
    """Runs a worker; the first argument describes its host, the others are its command."""
    place, command = json.loads(sys.argv[1]), sys.argv[2:]
    names = {TF_CONFIG, "PYTHONUNBUFFERED", *place["forward"]}
    env = {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith(PREFIX)
    }
    request = {
        "do": "run",
        "folder": place["folder"],
        "env": env,
        "guard": place["guard"],
        "command": command,
    }
    worker = RemoteWorker(place["host"], place["connect"], request)
    for signum in (signal.SIGINT, signal.SIGTERM, *PASSED_SIGNALS):
        signal.signal(signum, worker.pass_signal)
    _end_as(worker.run())
