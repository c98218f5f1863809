"""Runs a job for a command: shows its output, passes signals on, and starts it again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

import click

from tf_gradcomp.environment import LEVEL, MALLOC, PREFIX, RESTARTS, bypass, proxy_variable
from tf_gradcomp.launch import quiet
from tf_gradcomp.launch.output import (
    WorkerOutput,
    discard_terminal_output,
    discard_unread_output,
    echo,
    table_width,
)
from tf_gradcomp.launch.preload import Preloaded
from tf_gradcomp.launch.processes import PASSED_SIGNALS, THIS_MACHINE, LocalJob
from tf_gradcomp.launch.resources import malloc_settings
from tf_gradcomp.launch.result import JobResult
from tf_gradcomp.launch.scheduler import Rank
from tf_gradcomp.launch.ssh import Connection
from tf_gradcomp.tf_config import VARIABLE as TF_CONFIG
from tf_gradcomp.tf_config import host_of, make_tf_config

GRACE = 5.0  # seconds
_TAIL_LINES = 10
_LONGEST_TIMER = 1e8  # seconds
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PRELOAD_AFTER = 30.0  # seconds in which the workers start, and need the processors


def run_job(
    command: Sequence[str],
    workers: int,
    env: Mapping[str, str],
    *,
    output: str = "all",
    grace: float = GRACE,
    timeout: float | None = None,
    worker_env: Sequence[Mapping[str, str]] | None = None,
    rank: Rank | None = None,
    addresses: Sequence[str] | None = None,
    connections: Sequence[Connection] | None = None,
    preloaded: Preloaded | None = None,
    tf_config: bool = True,
    all_to_stderr: bool = False,
    verbose: bool = False,
) -> JobResult:
    """Runs a job to its end, or until Ctrl-C, and shows its output.

    Args:
        command: As for `LocalJob`.
        workers: As for `LocalJob`.
        env: As for `LocalJob`. Workers on hosts get only the variables that differ from those of
            this process, and those of `gradcomp`.
        output: `"all"`, or `"chief"` for worker 0 alone.
        grace: As for `LocalJob`.
        timeout: As for `LocalJob`.
        worker_env: As for `LocalJob`.
        rank: The rank of the only worker in a scheduler's job.
        addresses: The addresses of all workers of the job; by default they are on this machine.
        connections: The connections to the workers' hosts, which also have their addresses.
        preloaded: Processes that become the workers. New ones are started once the workers run.
        tf_config: As for `LocalJob`.
        all_to_stderr: Whether stdout stays free for other output.
        verbose: Whether to show the lines that `Quiet` would omit.
    """
    first, size = (rank.rank, rank.size) if rank else (0, workers)
    try:
        settings = malloc_settings(env)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    for name, value in settings.items() if verbose else ():
        echo(f"gradcomp: the workers get {name}={value} ({MALLOC}=default: none)", err=True)
    env = {**env, **settings}
    is_quiet = quiet.is_wanted(verbose)
    env = {LEVEL: "1" if is_quiet else "0", **env}
    if rank is None and sys.stdout is not None and sys.stdout.isatty():
        env["COLUMNS"] = str(table_width(size))
    if connections:
        addresses = [connection.address for connection in connections]
    if tf_config:
        hosts = [host_of(address) for address in addresses or [f"{THIS_MACHINE}:0"]]
        for name, value in bypass(hosts, env).items():
            if first == 0:
                reason = f"so that they do not connect to each other through {proxy_variable(env)}"
                echo(f"gradcomp: the workers get {name}={value}, {reason}.", err=True)
            env[name] = value
    if connections:
        env = {
            name: value
            for name, value in env.items()
            if name.startswith(PREFIX) or value != os.environ.get(name)
        }
    if addresses:
        worker_env = [
            {**variables, TF_CONFIG: make_tf_config(addresses, first + index)}
            for index, variables in enumerate(worker_env or [{}] * workers)
        ]
    with (
        _signals(grace, timeout) as signals,
        WorkerOutput(
            size,
            chief_only=output == "chief",
            all_to_stderr=all_to_stderr,
            bars=rank is None,
            quiet=is_quiet,
        ) as shown,
        LocalJob(
            command,
            workers,
            env=env,
            worker_env=worker_env,
            tf_config=tf_config and not addresses,
            connections=connections,
            preloaded=preloaded,
            first=first,
            on_line=shown.line,
            on_progress=shown.progress,
            grace=grace,
            timeout=timeout,
        ) as job,
    ):
        signals.pass_to(job, shown)
        while job.step():
            shown.show_suppressed()
            if preloaded and job.seconds > PRELOAD_AFTER:
                preloaded.start(env)
        return job.run()  # reads the rest of the pipes


def run_with_restarts(
    run: Callable[[float | None, Mapping[str, str]], JobResult],
    max_restarts: int,
    timeout: float | None,
    *,
    shown_tails: bool,
) -> list[JobResult]:
    """Runs a job, and runs it again each time that one of its workers has died.

    Args:
        run: Runs the job once, for at most a number of seconds, with more environment variables.
        max_restarts: The maximum number of restarts.
        timeout: The number of seconds that all runs together may take.
        shown_tails: As for `report_end`.

    Returns:
        The end of each run.
    """
    started = time.monotonic()
    results: list[JobResult] = []
    while True:
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
        restarts = {RESTARTS: str(len(results))} if max_restarts else {}
        try:
            result = run(left, restarts)
        except (click.ClickException, KeyboardInterrupt) as error:
            if not results:
                raise
            reason = error.message if isinstance(error, click.ClickException) else "interrupted."
            _warn(f"no restart: {reason}")
            return results
        if result.timed_out is not None:
            result = dataclasses.replace(result, timed_out=timeout)
        results.append(result)
        by_user = result.stop_signal is not None or result.timed_out is not None
        if result.first_failure is None or by_user or not max_restarts:
            return results
        if len(results) > max_restarts:
            _warn(f"--max-restarts allows only {max_restarts}.")
            return results
        report_end(result, shown_tails=shown_tails)
        _warn(f"restart {len(results)} of {max_restarts}.")


def _warn(text: str) -> None:
    click.secho(f"gradcomp: {text}", err=True, fg="yellow")


def report_end(result: JobResult, *, shown_tails: bool) -> None:
    """Prints which worker failed first, with its last lines unless they have been shown."""
    first = result.first_failure
    if first is not None and first.index != 0 and not shown_tails:
        tail = [line for line in first.stderr_tail if not quiet.is_noise(line)]
        for line in tail[-_TAIL_LINES:]:
            echo(f"[worker {first.index}] {line}", err=True)
    for line in result.summary():
        click.secho(f"gradcomp: {line}", err=True, fg="red" if first is not None else None)


class _Signals:
    """Passes signals to a job: requests to end, and signals for the workers' own handlers.

    SIGHUP is a request to end if the terminal has been closed. A job that does not end may be
    waiting for a reader of its output. In this case, the output is discarded.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._job: LocalJob | None = None
        self._shown: WorkerOutput | None = None
        self._early: list[tuple[int, bool]] = []  # before the job starts; True requests the end
        self._is_stopping = False
        self._had_terminal = _has_terminal()

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        """Handles a signal."""
        if signum == signal.SIGALRM:
            discard_unread_output()
            return
        is_closed = signum == signal.SIGHUP and self._had_terminal and not _has_terminal()
        if is_closed:
            discard_terminal_output()
        stops = is_closed or signum in _STOP_SIGNALS
        if stops:
            _alarm_in(0 if self._is_stopping else self._grace)
            self._is_stopping = True
        if self._job is None:
            self._early.append((signum, stops))
        else:
            self._deliver(signum, stops)

    def pass_to(self, job: LocalJob, shown: WorkerOutput) -> None:
        """Passes earlier and later signals to the job."""
        self._shown, self._job = shown, job  # in this order: a signal may arrive at any time
        for signum, stops in self._early:
            self._deliver(signum, stops)

    def _deliver(self, signum: int, stops: bool) -> None:
        assert self._job is not None
        assert self._shown is not None
        if stops:
            self._shown.stopping()
            self._job.stop(signum)
        else:
            self._job.pass_on(signum)


def _has_terminal() -> bool:
    """True if this process has a terminal that is open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _alarm_in(seconds: float) -> None:
    """Sends this process SIGALRM after some seconds and then every second.

    The alarm repeats because each signal unblocks only one write that waits for a reader.
    """
    signal.setitimer(signal.ITIMER_REAL, min(max(seconds, 0.1), _LONGEST_TIMER), 1)


@contextlib.contextmanager
def _signals(grace: float, timeout: float | None) -> Iterator[_Signals]:
    """Stops the job on Ctrl-C, SIGTERM and the end of the terminal; passes other signals on."""
    signals = _Signals(grace)
    handled = (*_STOP_SIGNALS, *PASSED_SIGNALS, signal.SIGALRM)
    before = {signum: signal.getsignal(signum) for signum in handled}
    for signum, handler in before.items():
        # A signal is ignored on purpose: by nohup, or by a shell for a background job.
        if handler is not signal.SIG_IGN:
            signal.signal(signum, signals)
    if timeout is not None:
        _alarm_in(timeout + grace)
    try:
        yield signals
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)
