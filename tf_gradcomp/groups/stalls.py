"""Watches for stalls: progress, the time that workers wait for each other, and reports."""

from __future__ import annotations

import atexit
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp.environment import HEARTBEAT_TIMEOUT, STALL_AFTER, START_TIMEOUT
from tf_gradcomp.groups.messages import log_warning
from tf_gradcomp.groups.rendezvous import connection_error
from tf_gradcomp.private import tensorflow as tf_private
from tf_gradcomp.stall_reports import continues, step_name, waits

HEARTBEATS = 60.0  # seconds; a worker may pause for half of it, and with TensorFlow's own 10 for 5
STALLS = 30.0  # seconds, so that a pause is reported before the heartbeats of the worker are missed

STARTS = 3600.0  # seconds


def heartbeat_timeout(seconds: float | None) -> float:
    """Returns the seconds after which TensorFlow considers a silent worker lost."""
    return _seconds("heartbeat_timeout", seconds, HEARTBEAT_TIMEOUT, HEARTBEATS)


def stall_after(seconds: float | None) -> float:
    """Returns the seconds in a collective after which a worker reports a stall; 0 means never."""
    return _seconds("stall_after", seconds, STALL_AFTER, STALLS, or_never=True)


def start_timeout() -> float:
    """Returns the seconds in which all workers must have started."""
    return _seconds("start_timeout", None, START_TIMEOUT, STARTS)


def _seconds(
    name: str, argument: float | None, variable: str, default: float, *, or_never: bool = False
) -> float:
    """Returns the time in seconds: the argument, the environment's value, or the default.

    Raises:
        ValueError: If it is not a number, or less than a second.
    """
    value: Any = os.environ.get(variable) if argument is None else argument
    if value is None:
        return default
    received = f"{variable if argument is None else name}={value!r}"
    seconds = _number(value)
    if 1 <= seconds < math.inf or (or_never and seconds == 0):
        return seconds
    never = ", or 0 for never" if or_never else ""
    raise ValueError(
        f"tf_gradcomp: expected a {name.replace('_', ' ')} of at least 1 "
        f"second{never}; received {received}."
    )


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


class Position(NamedTuple):
    """A worker's progress; the numbers of all workers are comparable."""

    events: int  # beginnings and ends of collectives
    steps: int  # the number of calls of `Strategy.run`

    @property
    def in_collective(self) -> bool:
        """Whether the worker waits for others."""
        return self.events % 2 == 1


class Progress:
    """Counts the steps of a strategy, and the beginnings and ends of its collectives.

    Nothing waits for a counter.
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._events = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._steps = tf.Variable(0, trainable=False, dtype=tf.int64)

    @tf.autograph.experimental.do_not_convert
    def count_step(self, inputs: Any) -> None:
        """Counts a step, which begins once the tensors in the nested `inputs` are computed."""
        _count(self._steps, tf.nest.flatten(inputs, expand_composites=True))

    @tf.autograph.experimental.do_not_convert
    def count_event(self, tensors: Sequence[Any]) -> None:
        """Counts the beginning or the end of a collective, once `tensors` are computed."""
        _count(self._events, tensors)

    def position(self) -> Position:
        """Returns this worker's position."""
        return Position(int(self._events.numpy()), int(self._steps.numpy()))


def _count(counter: tf.Variable, after: Sequence[Any]) -> None:
    if tf_private.in_xla():  # which may be on another device
        return
    with tf.control_dependencies([tensor for tensor in after if isinstance(tensor, tf.Tensor)]):
        counter.assign_add(1, read_value=False)


_SHORTEST_LOOK, _LONGEST_LOOK = 0.1, 3.0  # seconds between two looks
_LOOKS_OF_A_STALL = 10
_LOOKS_TO_ANSWER = 2  # a running worker reports its position at least once in so many looks
_ANSWER = 0.5  # seconds to wait for a position that has not been reported yet
_ANSWERS = 4.0  # seconds to wait for all workers' positions


class Report(NamedTuple):
    """The latest position that a worker has reported."""

    position: Position
    look: int  # the number of the worker's look


class CoordinationStore:
    """The key-value store of TensorFlow's coordination service, where workers report positions.

    Args:
        addresses: The addresses of all workers, `host:port`.
        heartbeat_timeout: The seconds after which TensorFlow considers a silent worker lost.

    Attributes:
        server: The worker whose process serves the store.
    """

    server = 0

    def __init__(self, addresses: Sequence[str], heartbeat_timeout: float) -> None:
        self._addresses = addresses
        self._heartbeat_timeout = heartbeat_timeout

    def post(self, worker: int, report: Report) -> None:
        """Replaces the worker's earlier report.

        Raises:
            TimeoutError: If the store does not answer.
        """
        key = _key(worker)
        if report.look > 0:
            if tf_private.announced(key, _ANSWER) is None:  # a write would block forever
                raise TimeoutError
            tf_private.withdraw(key)
        tf_private.announce(key, json.dumps([*report.position, report.look]))

    def read(self, worker: int, seconds: float) -> Report | None:
        """Returns a worker's latest report; None if the store has none within some seconds."""
        text = tf_private.announced(_key(worker), seconds)
        if text is None:
            return None
        events, steps, look = json.loads(text)
        return Report(Position(events, steps), look)

    def describe_silence(self, worker: int) -> str:
        """Describes the possible state of a worker that no longer reports."""
        return (
            f"{_process_state(self._addresses[worker])}. After {self._heartbeat_timeout:g} seconds "
            "of silence it is lost, and the job ends."
        )


class Watchdog:
    """Watches the progress of this worker, in a thread that ends with the process.

    A worker without progress reports its position at each look. A worker that has waited long in a
    collective reads all positions twice. A late worker is running if it has reported again between
    the two readings; otherwise it does not answer.

    Args:
        progress: This worker's counters of steps and collectives.
        rank: The number of this worker.
        names: The names of all workers.
        seconds: The time for which a worker waits before it reports.
        store: Holds the reports of all workers.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        progress: Progress,
        rank: int,
        names: Sequence[str],
        seconds: float,
        store: CoordinationStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._rank = rank
        self._names = names
        self._seconds = seconds
        self._store = store
        self._between_looks = min(_LONGEST_LOOK, max(_SHORTEST_LOOK, seconds / _LOOKS_OF_A_STALL))
        self._clock = clock
        self._position = Position(0, 0)
        self._look, self._looked = 0, clock()
        self._waited = 0.0  # seconds without progress
        self._unanswered = 0  # consecutive looks at which the store did not answer
        self._first_reports: list[Report | None] = []
        self._first_reading = 0  # the number of a look
        self._explained = False  # whether the causes of this stall are known
        self._warned = False  # whether the user was warned of this stall
        self._warned_of_network = False
        self._end = threading.Event()
        self._post()

    def start(self) -> None:
        """Watches until the process ends."""
        thread = threading.Thread(target=self._watch, name="gradcomp-watchdog", daemon=True)
        thread.start()

        def stop() -> None:
            self._end.set()
            thread.join(2 * _ANSWER)  # TensorFlow is torn down after this

        atexit.register(stop)

    def _watch(self) -> None:
        try:
            while not self._end.wait(self._between_looks):
                self.look()
        except (tf.errors.OpError, ConnectionError):
            pass  # the job ends with its own error message

    def look(self) -> None:
        """Looks at this worker's progress, and explains a long wait."""
        self._look += 1
        elapsed, self._looked = self._clock() - self._looked, self._clock()
        before, self._position = self._position, self._progress.position()
        if self._position.events != before.events:
            self._note_progress()
            return
        # A longer time is a pause of this worker itself.
        self._waited += min(elapsed, _LOOKS_TO_ANSWER * self._between_looks + _ANSWER)
        self._unanswered = 0 if self._post() else self._unanswered + 1
        if not self._explained and self._position.in_collective and self._waited >= self._seconds:
            self._explain()

    def _explain(self) -> None:
        """Warns of the workers that are late, as soon as their states are known."""
        server = self._store.server
        if self._unanswered:  # the states of the other workers are unknown
            if self._unanswered >= _LOOKS_TO_ANSWER:
                self._warn([self._describe_silent(server)])
        elif not self._first_reports:
            self._first_reports, self._first_reading = self._read_all(), self._look
        elif self._look >= self._first_reading + _LOOKS_TO_ANSWER:
            self._warn(self._describe_late())

    def _note_progress(self) -> None:
        if self._warned:
            log_warning(continues(self._waited))
        if self._waited:
            self._post()
        self._waited, self._first_reports = 0.0, []
        self._explained = self._warned = False

    def _post(self) -> bool:
        """Reports this worker's position; returns False if the store does not answer."""
        try:
            self._store.post(self._rank, Report(self._position, self._look))
        except TimeoutError:
            return False
        return True

    def _read_all(self) -> list[Report | None]:
        workers = range(len(self._names))
        seconds = max(_SHORTEST_LOOK, min(_ANSWER, _ANSWERS / len(workers)))
        return [self._store.read(worker, seconds) for worker in workers]

    def _describe_late(self) -> list[str]:
        """Describes the state of each worker that has not reached this collective."""
        late = []
        reports = zip(self._first_reports, self._read_all(), strict=True)
        for worker, (then, now) in enumerate(reports):
            if now is not None and now.position.events >= self._position.events:
                continue
            if now is None or then is None or now == then:
                late.append(self._describe_silent(worker))
            else:
                where = step_name(now.position.steps)
                late.append(f"{self._names[worker]} has not arrived: it runs, {where}.")
        return late

    def _describe_silent(self, worker: int) -> str:
        return f"{self._names[worker]} has not arrived: {self._store.describe_silence(worker)}"

    def _warn(self, late: Sequence[str]) -> None:
        self._explained = True
        if not late:
            if self._warned_of_network:  # the network is then slow in each step
                return
            self._warned_of_network = True
            late = ["All workers have arrived: the network is slow or cut."]
        self._warned = True
        log_warning(" ".join([waits(self._seconds, self._position.steps), *late]))


def _key(worker: int) -> str:
    return f"gradcomp/position/{worker}"


def _process_state(address: str) -> str:
    """Describes the process of a worker that does not answer."""
    error = connection_error(address)
    if error is None:
        return "its process is there but does not answer, so it is paused or blocked"
    if isinstance(error, ConnectionRefusedError):
        return "its process has ended"
    return "its machine cannot be reached"
