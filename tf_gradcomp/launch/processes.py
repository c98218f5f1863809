"""The processes of a job on this machine: started together, watched, and ended together."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING

from tf_gradcomp.launch.output import LineReader
from tf_gradcomp.launch.resources import ReservedPorts
from tf_gradcomp.launch.result import JobResult, WorkerEnd
from tf_gradcomp.tf_config import VARIABLE as TF_CONFIG
from tf_gradcomp.tf_config import make_tf_config

if TYPE_CHECKING:
    from tf_gradcomp.launch.preload import Preloaded
    from tf_gradcomp.launch.ssh import Connection

# How long one poll of the workers waits for output, and thus how late a worker's end may be
# noticed.
_POLL = 0.02
_CHUNK = 1 << 16
_PIPE_CHUNKS = 16  # No pipe holds more than this many chunks of earlier output.
_TAIL_LINES = 200
_DEFAULT_GRACE = 5.0
# How long a worker's own children may keep writing after the worker itself has ended.
_LAST_OUTPUT = 1.0
THIS_MACHINE = "localhost"
# The last words of a killed worker must not be lost in its buffer.
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}

# Run in front of each worker: asks Linux to kill the worker when the launcher dies for any reason,
# and becomes the worker's program. (A `preexec_fn` would run between fork and exec, which is not
# safe in a process with threads, such as a process that has loaded TensorFlow.) It also lets the
# worker receive SIGINT, even if the launcher ignores SIGINT because it runs in the background of a
# shell.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
signal.signal(signal.SIGINT, signal.SIG_DFL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""

# Programs and schedulers use these to ask for a checkpoint or other settings, and not for the end.
PASSED_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

LineHook = Callable[[int, str, str], None]
"""Takes the worker's index, `"stdout"` or `"stderr"`, and the line."""


def start_process(
    command: Sequence[str], env: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Starts a process in its own session and process group, which dies with this process."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *command],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=dict(env),
        start_new_session=True,
    )


class _Worker:
    """A worker: a process here, or one on a host behind a connection."""

    def __init__(
        self, index: int, process: subprocess.Popen[bytes], connection: Connection | None
    ) -> None:
        self.index = index
        self.end: WorkerEnd | None = None
        self.signalled = False
        self.stderr_tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process = process
        self._connection = connection
        self.pipes: dict[str, IO[bytes]] = {}
        for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            assert pipe is not None
            self.pipes[name] = pipe

    def returncode(self) -> int | None:
        """Checks whether the process has ended, and leaves it unreaped.

        While the process is unreaped, no other process can get its id, so the group can be killed
        safely.
        """
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        return self._worker_code(code)

    def _worker_code(self, code: int) -> int:
        """Returns the worker's exit code: on a host, the codes after 128 stand for signals."""
        by_signal = self._connection is not None and code - 128 in signal.valid_signals()
        return 128 - code if by_signal else code

    def send(self, signum: int) -> None:
        """Sends a signal to the process and to all processes that it has started."""
        if self._connection is not None and signum != signal.SIGKILL:
            self._connection.send_signal(signum, to_group=True)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signum)

    def pass_on(self, signum: int) -> None:
        """Sends a signal to the process alone: its children may have no handler for it."""
        if self._connection is not None:
            self._connection.send_signal(signum, to_group=False)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signum)

    def reap(self) -> int:
        """Kills the rest of the group, reaps the process, and returns its exit code."""
        if self._process.returncode is None:
            self.send(signal.SIGKILL)
            self._process.wait()
        for pipe in self.pipes.values():
            pipe.close()
        return self._worker_code(self._process.returncode)


class LocalJob:
    """A job of several worker processes on this machine.

    The workers run the same command. By default, each worker has its own TF_CONFIG. When a worker
    fails, the other workers get `grace` seconds to fail with their own errors, and are then killed:
    a process that waits in a TensorFlow collective ends neither on SIGINT nor on SIGTERM. If
    SIGKILL ended the worker, there are no such errors, and the others are killed at once.

    Nothing runs in the background: the job advances in `step`, which `run` calls until all workers
    have ended. Use it as a context manager, so that no process outlives the block, and in a thread
    that lives as long as the job: Linux kills the workers when the thread that started them ends.

    Args:
        command: The program and its arguments.
        workers: The number of workers to start.
        env: The environment of the workers, by default this process's own.
        worker_env: Additional environment variables of each worker.
        tf_config: Whether workers get a TF_CONFIG. If not, `worker_env` must connect them.
        worker_prefix: For each worker, a command that runs the worker's command, such as `ip netns
            exec NAME`; it must become the command, or pass its signals, output and exit code on.
        hosts: The name by which other workers reach each worker, if it is not `localhost`.
        connections: The connections to the hosts of the workers, if they are not processes here.
        preloaded: Processes that become the workers, as far as there are any.
        first: The index of the first worker, where these are a part of a larger job.
        on_line: Called with each line of output.
        on_progress: Called like `on_line`, with the state of a line that is being redrawn.
        grace: Seconds between the first failure (or the first `stop`) and SIGKILL for the other
            workers; `None` never ends the other workers of a failed worker.
        timeout: Seconds after which the whole job is stopped.

    Raises:
        ValueError: If an argument is not valid.

    Example:
        >>> with LocalJob([sys.executable, "train.py"], workers=2) as job:
        ...     result = job.run()
        >>> result.exit_code
        0
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        *,
        env: Mapping[str, str] | None = None,
        worker_env: Sequence[Mapping[str, str]] | None = None,
        tf_config: bool = True,
        worker_prefix: Sequence[Sequence[str]] | None = None,
        hosts: Sequence[str] | None = None,
        connections: Sequence[Connection] | None = None,
        preloaded: Preloaded | None = None,
        first: int = 0,
        on_line: LineHook | None = None,
        on_progress: LineHook | None = None,
        grace: float | None = _DEFAULT_GRACE,
        timeout: float | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"A job needs at least one worker. Received: workers={workers}")
        worker_arguments = {
            "worker_env": worker_env,
            "worker_prefix": worker_prefix,
            "hosts": hosts,
            "connections": connections,
        }
        for name, values in worker_arguments.items():
            if values is not None and len(values) != workers:
                raise ValueError(
                    f"{name} must have one entry for each of the {workers} workers. "
                    f"Received: {len(values)} entries"
                )
        self._on_line = on_line
        self._on_progress = on_progress
        self._grace = grace
        self._timeout = timeout
        self._ends: list[WorkerEnd] = []
        self._workers: list[_Worker] = []
        self._stop_signals: list[int] = []
        self._passed_signals: deque[int] = deque()
        self._stops_obeyed = 0
        self._timed_out = False
        self._kill_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._ports = ReservedPorts(hosts or [THIS_MACHINE] * workers)
        self._started = time.monotonic()
        env = UNBUFFERED | dict(os.environ if env is None else env)
        try:
            for index in range(workers):
                worker_command = [*(worker_prefix[index] if worker_prefix else ()), *command]
                variables = dict(env)
                if tf_config:
                    variables[TF_CONFIG] = make_tf_config(self._ports.addresses, index)
                variables |= worker_env[index] if worker_env else {}
                if connections:
                    connections[index].start_worker(worker_command, variables)
                    worker = _Worker(first + index, connections[index].process, connections[index])
                else:
                    taken = preloaded.take(worker_command, variables) if preloaded else None
                    process = taken or start_process(worker_command, variables)
                    worker = _Worker(first + index, process, None)
                self._workers.append(worker)
                for stream, pipe in worker.pipes.items():
                    os.set_blocking(pipe.fileno(), False)
                    source = (worker, stream, LineReader())
                    self._selector.register(pipe, selectors.EVENT_READ, source)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LocalJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def seconds(self) -> float:
        """The seconds since the start of the job."""
        return time.monotonic() - self._started

    @property
    def ends(self) -> tuple[WorkerEnd, ...]:
        """The ends of the workers that have ended, in that order."""
        return tuple(self._ends)

    def run(self) -> JobResult:
        """Runs the job to its end and returns its result."""
        while self.step():
            pass
        self._read_last_output()
        self.close()
        return self.result()

    def result(self) -> JobResult:
        """Returns the result of the ended job."""
        return JobResult(
            ends=self.ends,
            timed_out=self._timeout if self._timed_out else None,
            stop_signal=self._stop_signals[0] if self._stop_signals else None,
        )

    def step(self) -> bool:
        """Polls the workers once: reads output, records ended workers, and kills overdue workers.

        Returns:
            Whether any worker is still running.
        """
        self._read_output(_POLL)
        self._note_ends()
        while self._passed_signals:
            signum = self._passed_signals.popleft()
            for worker in self._running():
                worker.pass_on(signum)
        self._obey_stops()
        self._obey_clock()
        return bool(self._running())

    def send(self, index: int, signum: int) -> None:
        """Sends a signal to one worker's process group, as another program might."""
        (worker,) = (worker for worker in self._workers if worker.index == index)
        if worker.end is None:
            worker.send(signum)

    def stop(self, signum: int = signal.SIGINT) -> None:
        """Asks the workers to end; a second call kills them. May be called by a signal handler.

        Args:
            signum: The user's signal, which determines the job's exit code.
        """
        self._stop_signals.append(signum)

    def pass_on(self, signum: int) -> None:
        """Sends a signal of the user to the workers. May be called by a signal handler."""
        self._passed_signals.append(signum)

    def _end_after(self, seconds: float) -> None:
        """Kills running workers after some seconds, unless they are about to be killed already."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + seconds

    @property
    def _grace_after_stop(self) -> float:
        return _DEFAULT_GRACE if self._grace is None else self._grace

    def close(self) -> None:
        """Kills running workers, reaps all workers, and releases their ports."""
        self._signal_running(signal.SIGKILL)
        for worker in self._workers:
            returncode = worker.reap()
            if worker.end is None:
                self._note_end(worker, returncode)
        self._selector.close()
        self._ports.release()

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.end is None]

    def _signal_running(self, signum: int) -> None:
        for worker in self._running():
            worker.signalled = True
            worker.send(signum)

    def _note_ends(self) -> None:
        for worker in self._running():
            returncode = worker.returncode()
            if returncode is None:
                continue
            self._drain(worker)
            self._note_end(worker, returncode)
            if returncode != 0 and self._grace is not None:
                self._end_after(0.0 if returncode == -signal.SIGKILL else self._grace)

    def _note_end(self, worker: _Worker, returncode: int) -> None:
        tail = tuple(worker.stderr_tail)
        worker.end = WorkerEnd(worker.index, returncode, self.seconds, worker.signalled, tail)
        self._ends.append(worker.end)

    def _obey_stops(self) -> None:
        if len(self._stop_signals) == self._stops_obeyed:
            return
        first = self._stops_obeyed == 0
        self._stops_obeyed = len(self._stop_signals)
        # Workers get SIGINT in place of any signal, because Python programs clean up on SIGINT, but
        # not on SIGTERM.
        self._signal_running(signal.SIGINT if first else signal.SIGKILL)
        self._end_after(self._grace_after_stop)

    def _obey_clock(self) -> None:
        if self._timeout is not None and not self._timed_out and self.seconds > self._timeout:
            self._timed_out = bool(self._running())
            # The KeyboardInterrupt of a hanging Python program shows where it hangs.
            self._signal_running(signal.SIGINT)
            self._end_after(self._grace_after_stop)
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._signal_running(signal.SIGKILL)

    def _open_pipes(self) -> list[selectors.SelectorKey]:
        return list((self._selector.get_map() or {}).values())

    def _read_output(self, wait: float) -> None:
        if not self._open_pipes():
            time.sleep(wait)
            return
        for key, _ in self._selector.select(wait):
            self._read(key)

    def _read_last_output(self) -> None:
        until = time.monotonic() + _LAST_OUTPUT
        while self._open_pipes() and time.monotonic() < until:
            self._read_output(_POLL)
        for key in self._open_pipes():
            self._end_of_output(key)

    def _drain(self, worker: _Worker) -> None:
        """Reads the rest of an ended worker's pipes, so that its last lines are known."""
        for key in [key for key in self._open_pipes() if key.data[0] is worker]:
            for _ in range(_PIPE_CHUNKS):
                if not self._read(key):
                    break

    def _read(self, key: selectors.SelectorKey) -> bool:
        """Reads a chunk from a pipe; returns whether there was one."""
        worker, stream, reader = key.data
        try:
            chunk = os.read(key.fd, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._end_of_output(key)
            return False
        for line in reader.feed(chunk):
            self._show(worker, stream, line)
        if self._on_progress is not None and reader.progress:
            self._on_progress(worker.index, stream, reader.progress)
        return True

    def _end_of_output(self, key: selectors.SelectorKey) -> None:
        worker, stream, reader = key.data
        self._selector.unregister(key.fileobj)
        for line in reader.close():
            self._show(worker, stream, line)

    def _show(self, worker: _Worker, stream: str, line: str) -> None:
        if stream == "stderr":
            worker.stderr_tail.append(line)
        if self._on_line is not None:
            self._on_line(worker.index, stream, line)
