"""Ends a job when `gradcomp` receives a signal to end, and passes other signals on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tf_gradcomp.cli.output import WorkerOutput, discard_terminal_output, discard_unread_output
from tf_gradcomp.launch import PASSED_SIGNALS, LocalJob

_LONGEST = 1e8  # the longest timer, in seconds
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """Collects signals, until a job can receive them.

    SIGHUP is a request to end if the terminal has been closed.

    A job that does not end may be waiting for a reader of its output. In this case, gradcomp
    discards the output.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._job: LocalJob | None = None
        self._shown: WorkerOutput | None = None
        self._early: list[tuple[Callable[[int], None], int]] = []
        self._stops = False
        self._had_terminal = _has_terminal()

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        """Handles a signal."""
        if signum == signal.SIGALRM:
            discard_unread_output()
            return
        closed = signum == signal.SIGHUP and self._had_terminal and not _has_terminal()
        if closed:
            discard_terminal_output()
        if closed or signum in _STOP_SIGNALS:
            _alarm_in(0 if self._stops else self._grace)
            self._stops = True
            deliver = self._stop
        else:
            deliver = self._pass_on
        if self._job is None:
            self._early.append((deliver, signum))
        else:
            deliver(signum)

    def pass_to(self, job: LocalJob, shown: WorkerOutput) -> None:
        """Passes earlier and later signals to the job."""
        self._job, self._shown = job, shown
        for deliver, signum in self._early:
            deliver(signum)

    def _pass_on(self, signum: int) -> None:
        if self._job:
            self._job.pass_on(signum)

    def _stop(self, signum: int) -> None:
        if self._job and self._shown:
            self._shown.stopping()
            self._job.stop(signum)


def _has_terminal() -> bool:
    """Returns whether this process has a terminal that is open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _alarm_in(seconds: float) -> None:
    """Sends this process SIGALRM after some seconds and then every second.

    The alarm repeats because each signal unblocks only one write that waits for a reader.
    """
    signal.setitimer(signal.ITIMER_REAL, min(max(seconds, 0.1), _LONGEST), 1)


@contextmanager
def stop_requests(grace: float, timeout: float | None) -> Iterator[StopRequests]:
    """Stops the job on Ctrl-C, SIGTERM and the end of the terminal; passes other signals on."""
    requests = StopRequests(grace)
    handled = (*_STOP_SIGNALS, *PASSED_SIGNALS, signal.SIGALRM)
    before = {signum: signal.getsignal(signum) for signum in handled}
    for signum, handler in before.items():
        # A signal is ignored on purpose: by nohup, or by a shell for a background job.
        if handler is not signal.SIG_IGN:
            signal.signal(signum, requests)
    if timeout is not None:
        _alarm_in(timeout + grace)
    try:
        yield requests
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)
