"""Processes that import modules in advance, and become the workers of a restarted job."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tf_gradcomp.launch.processes import UNBUFFERED, start_process

# Run by a process in advance. Its input has the worker's variables, and its arguments as for
# `python`: a program, or -m and a module.
_PROGRAM = """
import importlib, json, os, runpy, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        text = "gradcomp: --preload failed, so a worker starts without it:"
        print(f"{text} {type(error).__name__}: {error}", file=sys.stderr)
work = json.loads(sys.stdin.readline() or sys.exit())
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.environ.clear()
os.environ.update(work["variables"])
sys.argv = work["arguments"]
is_module = sys.argv[0] == "-m"
if is_module:
    del sys.argv[0]
if not sys.flags.safe_path:
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(sys.argv[0]))
if is_module:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Preloaded:
    """Processes that have imported modules and wait to become workers.

    Use it as a context manager, which ends those that still wait.

    Args:
        modules: The names of the modules.
        workers: The number of processes.
    """

    def __init__(self, modules: Sequence[str], workers: int) -> None:
        self._modules = modules
        self._workers = workers
        self._waiting: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Preloaded:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._waiting:
            _end(process)

    def start(self, variables: Mapping[str, str]) -> None:
        """Starts the processes that are missing, with these environment variables."""
        command = [sys.executable, "-c", _PROGRAM, *self._modules]
        while len(self._waiting) < self._workers:
            process = start_process(command, UNBUFFERED | dict(variables), stdin=subprocess.PIPE)
            self._waiting.append(process)

    def take(
        self, command: Sequence[str], variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | None:
        """Returns a process that now runs a command of this Python; None if no process waits."""
        work = {"variables": dict(variables), "arguments": list(command[1:])}
        while self._waiting:
            process = self._waiting.pop()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # something has killed the process
                process.stdin.write(json.dumps(work).encode() + b"\n")
                process.stdin.close()
                return process
            _end(process)
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # closes its pipes, and waits
