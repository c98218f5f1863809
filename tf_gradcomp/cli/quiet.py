"""Omits lines of the workers' stderr that are useless or repeated."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tf_gradcomp.launch.result import LOG, TRACEBACK, same_but_for_numbers

LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # 0 shows everything, 1 hides information
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
_QUIET = 1.0  # seconds without a line, after which a traceback is over
_LONGEST_HELD = 5.0  # seconds
_MOST_LINES = 1000


def wanted(verbose: bool, env: Mapping[str, str] = os.environ) -> bool:
    """Returns whether to omit lines: not if the user asks for all of TensorFlow's lines."""
    return not verbose and env.get(LEVEL) != "0"


def is_noise(line: str) -> bool:
    """Returns whether a line is of TensorFlow's start-up, and no user needs it."""
    return bool(_NOISE.match(line))


@dataclass
class _Block:
    """A traceback of one worker, and the following lines."""

    worker: int
    lines: list[str]
    began: float = field(default_factory=time.monotonic)
    latest: float = field(default_factory=time.monotonic)

    def add(self, line: str) -> None:
        self.latest = time.monotonic()
        self.lines.append(line)


class Quiet:
    """Decides which lines of the workers' stderr are shown.

    The first traceback is shown as it comes. Tracebacks of other workers are held back until they
    end, and shown unless they repeat the first traceback. Once the user has stopped the job, all
    tracebacks are held back, and tracebacks of the interruption itself are never shown.
    """

    def __init__(self, workers: int) -> None:
        self.stopped = False
        self._workers = workers
        self._first: _Block | None = None
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
        now = time.monotonic()
        held = sorted(self._held.values(), key=lambda block: block.worker)
        quiet = all(now - block.latest > _QUIET for block in held)
        late = any(now - block.began > _LONGEST_HELD for block in held)
        if not held or not (quiet or late or all_ended):
            return
        self._held = {}
        same = []
        for block in held:
            rest: Sequence[str] | None = block.lines
            if self.stopped:
                rest = [] if _is_interruption(block.lines) else block.lines
            elif self._first and (rest := _beyond(block.lines, self._first.lines)) is None:
                rest = block.lines
            elif self._first:
                same.append(block.worker)
            yield from ((block.worker, line) for line in rest or ())
        every = len(same) + 1 == self._workers
        # The job's end is printed next, with an error that ended all workers.
        if same and self._first and not (every and all_ended):
            names = f"worker{'s' if len(same) > 1 else ''} {', '.join(map(str, same))}"
            whom = "all workers" if every else f"{names} as on worker {self._first.worker}"
            yield None, f"the same error on {whom}."


def _is_interruption(lines: Sequence[str]) -> bool:
    said = (line for line in lines if line.strip() and not line[0].isspace())
    return all(line == TRACEBACK or _INTERRUPTED.match(line) for line in said)


def _beyond(lines: Sequence[str], shown: Sequence[str]) -> Sequence[str] | None:
    """Returns the lines after the traceback in `lines`; None if `shown` has another traceback."""
    own, other = (_until_log(one) for one in (lines, shown))
    both = min(len(own), len(other))
    equal = all(
        same_but_for_numbers(a) == same_but_for_numbers(b) for a, b in zip(own, other, strict=False)
    )
    complete = any(line.strip() and not line[0].isspace() for line in own[1:both])
    return lines[both:] if equal and complete else None


def _until_log(lines: Sequence[str]) -> Sequence[str]:
    end = next((i for i, line in enumerate(lines) if LOG.match(line)), len(lines))
    return lines[:end]
