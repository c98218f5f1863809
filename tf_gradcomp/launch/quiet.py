"""Omits lines of the workers' stderr that are useless or repeated."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tf_gradcomp.environment import LEVEL
from tf_gradcomp.launch.result import (
    LOG,
    LOST_OTHERS,
    TRACEBACK,
    is_message,
    same_but_for_numbers,
)

# TensorFlow's information, and its harmless warnings and errors. Lines from before it has read the
# level come at any level.
_NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|I\d{4} \S+ +\d+ \S+\.(cc|h):\d+\] "
    r"|\d{4}-\d\d-\d\d \S+ I \S+\.(cc|h):\d+\] "
    r"|.*\bdataset\.cc:\d+\] Input of GeneratorDatasetOp::Dataset will not be optimized"
    r"|.*\] Unable to register cu(DNN|FFT|BLAS) factory: Attempting to register factory"
    r"|.*\] computation placer already registered"
    r"|.*\] TF-TRT Warning: Could not find TensorRT"
)
_INTERRUPTED = re.compile(
    r"KeyboardInterrupt$|Process \S+:$|During handling of the above exception"
)
# Errors of TensorFlow where an interruption has come at an unlucky time.
_BY_INTERRUPTION = re.compile(
    r".*\b(REPLACED BY KeyboardInterrupt|Improper nesting of variable_scope)\b"
)
_QUIET = 1.0  # seconds without a line, after which a complete traceback is over
_LONGEST_HELD = 5.0  # seconds
_MOST_LINES = 1000
_MOST_COMPARED = 16  # tracebacks


def is_wanted(verbose: bool, env: Mapping[str, str] = os.environ) -> bool:
    """Whether to omit lines: not if the user asks for all of TensorFlow's lines."""
    return not verbose and env.get(LEVEL) != "0"


def is_noise(line: str) -> bool:
    """Whether a line is of TensorFlow's start-up, and no user needs it."""
    return bool(_NOISE.match(line))


def _now() -> float:
    return time.monotonic()


@dataclass
class _Block:
    """A traceback of one worker, and the following lines."""

    worker: int
    lines: list[str]
    began: float = field(default_factory=_now)
    latest: float = field(default_factory=_now)

    def add(self, line: str) -> None:
        self.latest = _now()
        self.lines.append(line)


class Quiet:
    """Decides which lines of the workers' stderr are shown.

    The first traceback is shown as it comes. Tracebacks of other workers are held back until they
    end, and shown unless they repeat a shown traceback. Once the user has stopped the job, all
    tracebacks are held back, and tracebacks of the interruption itself are never shown.
    """

    def __init__(self, workers: int) -> None:
        self.stopped = False
        self._workers = workers
        self._first: _Block | None = None
        self._later: deque[_Block] = deque(maxlen=_MOST_COMPARED)  # held back, and then shown
        self._held: dict[int, _Block] = {}

    def shows(self, worker: int, line: str) -> bool:
        """Takes a line; returns whether to show it now."""
        if is_noise(line):
            return False
        if worker in self._held:
            self._held[worker].add(line)
            return False
        by_first = self._first is not None and self._first.worker == worker
        if line == TRACEBACK:
            if self.stopped or not (by_first or self._first is None):
                self._held[worker] = _Block(worker, [line])
                return False
            self._first = _Block(worker, [line])
        elif by_first and self._first and len(self._first.lines) < _MOST_LINES:
            self._first.add(line)
        return True

    def due(self, *, all_ended: bool = False) -> Iterator[tuple[int | None, str]]:
        """Yields the suppressed lines that are now to be shown, each with its worker.

        A line with None as worker reports that several workers had the same error.
        """
        held = sorted(self._held.values(), key=lambda block: block.worker)
        if not held or not (all_ended or self._are_over(held)):
            return
        self._held = {}
        same: dict[int, list[int]] = {}
        for block in held:
            lines: Sequence[str] = block.lines
            if self.stopped:
                lines = [] if _is_interruption(block.lines) else block.lines
            elif found := self._repeated_by(block):
                shown, lines = found
                same.setdefault(shown.worker, []).append(block.worker)
            else:
                self._later.append(block)
            yield from ((block.worker, line) for line in lines)
        for worker, workers in same.items():
            every = len(workers) + 1 == self._workers
            # The job's end is printed next, with an error that ended all workers.
            if not (every and all_ended):
                names = f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
                whom = "all workers" if every else f"{names} as on worker {worker}"
                yield None, f"the same error on {whom}."

    def _are_over(self, held: Sequence[_Block]) -> bool:
        """Whether tracebacks are complete; a paused worker may be in the middle of one."""
        now = _now()
        if any(now - block.began > _LONGEST_HELD for block in held):
            return True
        first = [] if self._first is None else [self._first]
        return all(now - block.latest > _QUIET for block in held) and all(
            _has_error(block.lines) for block in [*held, *first]
        )

    def _repeated_by(self, block: _Block) -> tuple[_Block, Sequence[str]] | None:
        """Returns the shown traceback that a block repeats, if any, and the lines to show."""
        for shown in filter(None, [self._first, *self._later]):
            if shown.worker != block.worker:
                lines = _beyond(block.lines, shown.lines)
                if lines is not None:
                    return shown, lines
        return None


def _is_interruption(lines: Sequence[str]) -> bool:
    in_message = False  # of an error of several lines
    for line in lines:
        if line == TRACEBACK or LOG.match(line):
            in_message = False
        elif _BY_INTERRUPTION.match(line) or LOST_OTHERS.search(line):
            in_message = True
        elif not (in_message or _INTERRUPTED.match(line)) and is_message(line):
            return False
    return True


def _beyond(lines: Sequence[str], shown: Sequence[str]) -> Sequence[str] | None:
    """Returns the lines after the traceback in `lines`; None if `shown` has another traceback."""
    lines_here, lines_shown = (_until_log(block) for block in (lines, shown))
    common = min(len(lines_here), len(lines_shown))
    equal = all(
        same_but_for_numbers(a) == same_but_for_numbers(b)
        for a, b in zip(lines_here, lines_shown, strict=False)
    )
    return lines[common:] if equal and _has_error(lines_here[:common]) else None


def _has_error(traceback: Sequence[str]) -> bool:
    """Whether a traceback has come to its error, which is not indented."""
    return any(line.strip() and not line[0].isspace() for line in traceback[1:])


def _until_log(lines: Sequence[str]) -> Sequence[str]:
    end = next((i for i, line in enumerate(lines) if LOG.match(line)), len(lines))
    return lines[:end]
