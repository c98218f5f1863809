"""Describes the end of a job and of its workers."""

from __future__ import annotations

import re
import signal
import textwrap
from dataclasses import dataclass
from typing import Any

TRACEBACK = "Traceback (most recent call last):"
_LONGEST_SHOWN = 100  # characters of an error whose whole message stands above
_LONGEST = 400
# The errors of a worker that has lost another worker.
LOST_OTHERS = re.compile(
    r"Horovod has been shut down|Unavailable|UNAVAILABLE|Socket closed|Collective ops is aborted"
    r"|[Cc]oordination ?[Ss]ervice|heartbeat|Connection re(set|fused)"
)
_SAME_STEPS = "All workers must take the same number of steps."
# The parts in which equal errors differ between workers: numbers, addresses, generated names.
_WORKER_DETAILS = re.compile(r"0x[0-9a-f]+|__autograph_generated_file\w+|\d+")
# TensorFlow's log, which is not an error; and the lines before TensorFlow or Python aborts.
LOG = re.compile(r"^([IWE]\d{4} |\d{4}-\d\d-\d\d \S+ [IWE] |WARNING: All log messages before)")
_FATAL = re.compile(r"^(F\d{4} |\d{4}-\d\d-\d\d \S+ F |Fatal Python error: )")


@dataclass(frozen=True)
class WorkerEnd:
    """The end of one worker."""

    index: int  # the number of the worker
    returncode: int  # the exit code, or minus the number of the signal that ended the worker
    seconds: float  # from the start of the job to the end of the worker
    ended_by_launcher: bool = False  # whether the launcher had already sent a signal
    stderr_tail: tuple[str, ...] = ()  # the worker's last lines on stderr

    @property
    def failed_by_itself(self) -> bool:
        """Whether the worker failed before the launcher ended it."""
        return self.returncode != 0 and not self.ended_by_launcher

    @property
    def exit_code(self) -> int:
        """The exit code as a shell counts it: 128 and the signal's number for a signal."""
        return 128 - self.returncode if self.returncode < 0 else self.returncode

    @property
    def how(self) -> str:
        """`exit code 3` or `killed by SIGSEGV`."""
        if self.returncode >= 0:
            return f"exit code {self.returncode}"
        return f"killed by {_signal_name(-self.returncode)}"

    @property
    def lost_another(self) -> bool:
        """True if this worker's error reports the loss of another worker."""
        return bool(LOST_OTHERS.search(self.error))

    @property
    def error(self) -> str:
        """The line of the worker's stderr that best explains its failure; empty if none does."""
        if self.returncode == -signal.SIGKILL:
            return ""  # No process can write anything after SIGKILL.
        return _error_line(self.stderr_tail)


@dataclass(frozen=True)
class JobResult:
    """The end of a job."""

    ends: tuple[WorkerEnd, ...]  # the ends of the workers, in their order
    timed_out: float | None = None  # the time limit of the job in seconds, if the job reached it
    stop_signal: int | None = None  # the user's signal that ended the job, if there was one

    @property
    def first_failure(self) -> WorkerEnd | None:
        """The worker that failed first, if any failed by itself.

        A failing worker closes its connections before it ends, so other workers may end earlier.
        """
        failed = [end for end in self.ends if end.failed_by_itself]
        return next((end for end in failed if not end.lost_another), next(iter(failed), None))

    @property
    def exit_code(self) -> int:
        """The exit code of the whole job.

        If a worker failed, the job has the exit code of the worker that failed first. Otherwise the
        code is 128 plus the signal's number if the user ended the job; 124, as with `timeout`, at
        the time limit; or 0.
        """
        if self.first_failure is not None:
            return self.first_failure.exit_code
        if self.stop_signal is not None:
            return 128 + self.stop_signal
        return 124 if self.timed_out is not None else 0

    def as_dict(self) -> dict[str, Any]:
        """Returns the end of the job and of each worker, JSON-serializable."""
        workers = [
            {
                "worker": end.index,
                "exit_code": end.exit_code,
                "seconds": round(end.seconds, 3),
                "ended_by_launcher": end.ended_by_launcher,
                "error": end.error if end.returncode else "",
            }
            for end in sorted(self.ends, key=lambda end: end.index)
        ]
        first = self.first_failure
        return {
            "exit_code": self.exit_code,
            "first_failure": None if first is None else first.index,
            "timed_out": self.timed_out is not None,
            "workers": workers,
        }

    def summary(self) -> list[str]:
        """Reports in a few lines which worker died first and why, and how the others ended."""
        first = self.first_failure
        if first is not None:
            return self._failure_lines(first)
        if self.stop_signal is not None:
            return [f"stopped by {_signal_name(self.stop_signal)}."]
        if self.timed_out is None:
            return []
        ended = sorted(end.index for end in self.ends if end.ended_by_launcher)
        return [
            f"the time limit of {self.timed_out:g} s was reached; ended workers: "
            f"{', '.join(map(str, ended))}.",
            *(
                f"worker {end.index} had left after {end.seconds:.1f} s, {end.how}. If the other "
                f"workers waited for it, this is the cause. {_SAME_STEPS}"
                for end in self.ends
                if not end.ended_by_launcher
            ),
        ]

    def _failure_lines(self, first: WorkerEnd) -> list[str]:
        # If the first failure is the loss of another worker, one that left before is the cause.
        before = self.ends[: self.ends.index(first)]
        early = [end for end in before if first.lost_another and end.returncode == 0]
        lines = [
            f"worker {end.index} left first, after {end.seconds:.1f} s, without an error, and "
            f"worker {first.index} then waited for it. This is the likely cause. {_SAME_STEPS}"
            for end in early
        ]
        later_ends = [end for end in self.ends if end is not first and end not in early]
        same = [end for end in later_ends if first.error and _manner(end) == _manner(first)]
        if same and len(same) + 1 == len(self.ends):
            return [f"all workers died with the same error, {_details(first)}"]
        lines.append(f"worker {first.index} died{'' if early else ' first'}, {_details(first)}")
        if same:
            indices = ", ".join(str(index) for index in sorted(end.index for end in same))
            workers = f"worker{'s' if len(same) > 1 else ''} {indices}"
            lines.append(f"{workers} followed, with the same error.")
        for end in later_ends:
            if end.ended_by_launcher:
                lines.append(f"worker {end.index} was still running and has been ended.")
            elif end.returncode == 0:
                lines.append(f"worker {end.index} ended well, after {end.seconds:.1f} s.")
            elif end not in same:
                lines.append(f"worker {end.index} followed, {_details(end)}")
        return lines


def is_message(line: str) -> bool:
    """Whether a line of a traceback is an error's, and not of a frame.

    Frames are indented, and also the marks under their code, except some marks of a long line.
    """
    return bool(line.strip("^~ ")) and not line[0].isspace()


def same_but_for_numbers(text: str) -> str:
    """Returns the text without the parts in which equal errors differ between workers."""
    return _WORKER_DETAILS.sub("#", text)


def _manner(end: WorkerEnd) -> tuple[bool, str, str]:
    return end.failed_by_itself, end.how, same_but_for_numbers(end.error)


def _details(end: WorkerEnd) -> str:
    killed = end.returncode == -signal.SIGKILL and not end.ended_by_launcher
    hint = " (not by gradcomp; the system does so when memory runs out)" if killed else ""
    shown = textwrap.shorten(end.error, _LONGEST_SHOWN, placeholder=" ...")
    reason = f": {shown}" if shown else "."
    return f"after {end.seconds:.1f} s: {end.how}{hint}{reason}"


def _signal_name(signal_number: int) -> str:
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"


def _error_line(lines: tuple[str, ...]) -> str:
    """Returns the line that best explains an error: of a traceback, of an abort, or the last."""
    errors = [line for line in lines if line.strip() and not LOG.match(line)]
    if TRACEBACK in errors:
        error = _exception(errors[len(errors) - errors[::-1].index(TRACEBACK) :])
        if error:
            return error[:_LONGEST]
    fatal = [line for line in errors if _FATAL.match(line)]
    return (fatal or errors or [""])[-1].strip()[:_LONGEST]


def _exception(after_traceback: list[str]) -> str:
    # The exception is not indented, and the following lines may be its message.
    flush_left = [line for line in after_traceback if is_message(line)]
    error = flush_left[0] if flush_left else ""
    if error.endswith((" Graph execution error:", ".call().")):
        # TensorFlow names the node, and Keras the layer; the error itself follows below.
        details = [line for line in flush_left[1:] if not line.startswith("Detected at ")]
        return " ".join([error, *details[:1]])
    if error.endswith(" in user code:"):
        return f"{error} {after_traceback[-1].strip()}"  # AutoGraph's own, indented traceback.
    return error
