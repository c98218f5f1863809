"""Ends a job when `gradcomp` receives a signal to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tf_gradcomp.cli.output import WorkerOutput, discard_terminal_output, discard_unread_output
from tf_gradcomp.launch import LocalJob

_LONGEST = 1e8  # the longest timer, in seconds
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequests:
    """Collects signals to end, until a job can receive them.

    A job that does not end may be waiting for a reader of its output. In this case, gradcomp
    discards the output.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._job: LocalJob | None = None
        self._shown: WorkerOutput | None = None
        self._early: list[int] = []
        self._stops = False

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        """Handles a signal."""
        if signum == signal.SIGALRM:
            discard_unread_output()
            return
        _alarm_in(0 if self._stops else self._grace)
        self._stops = True
        if signum == signal.SIGHUP:
            discard_terminal_output()
        if self._job is None:
            self._early.append(signum)
        else:
            self._stop(signum)

    def pass_to(self, job: LocalJob, shown: WorkerOutput) -> None:
        """Passes earlier and later signals to the job."""
        self._job, self._shown = job, shown
        for signum in self._early:
            self._stop(signum)

    def _stop(self, signum: int) -> None:
        if self._job and self._shown:
            self._shown.stopping()
            self._job.stop(signum)


def _alarm_in(seconds: float) -> None:
    """Sends this process SIGALRM after some seconds and then every second.

    The alarm repeats because each signal unblocks only one write that waits for a reader.
    """
    signal.setitimer(signal.ITIMER_REAL, min(max(seconds, 0.1), _LONGEST), 1)


@contextmanager
def stop_requests(grace: float, timeout: float | None) -> Iterator[StopRequests]:
    """Takes Ctrl-C, SIGTERM and the closing of the terminal as requests to stop the job."""
    requests = StopRequests(grace)
    before = {signum: signal.getsignal(signum) for signum in (*_STOP_SIGNALS, signal.SIGALRM)}
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
