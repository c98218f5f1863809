"""Reports which workers a job waits for, when it has waited for long."""

from __future__ import annotations

import abc
import atexit
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_gradcomp import tf_private_files
from tf_gradcomp.groups.notices import warn_user
from tf_gradcomp.groups.progress import Position, Progress

_SHORTEST_LOOK, _LONGEST_LOOK = 0.1, 3.0  # seconds between two looks
_LOOKS_OF_A_STALL = 10
_LOOKS_TO_ANSWER = 2  # in which a worker that runs tells its position anew
_ANSWER = 0.5  # seconds to wait for a position that was not told yet
_ANSWERS = 4.0  # seconds, for all workers together
_CONNECT = 1.0  # seconds


class Told(NamedTuple):
    """A position that a worker has told the others."""

    position: Position
    look: int  # the number of its look


class Board(abc.ABC):
    """The place where workers tell each other their positions.

    Attributes:
        keeper: The worker whose process keeps the board; None if no worker does.
    """

    keeper: int | None = None

    @abc.abstractmethod
    def write(self, key: str, text: str, *, first: bool) -> None:
        """Writes under a key; raises TimeoutError if the board does not answer."""

    @abc.abstractmethod
    def text(self, key: str, seconds: float) -> str | None:
        """Returns the text under a key; None if there is none within some seconds."""

    def tell(self, worker: int, told: Told) -> None:
        """Tells a position, in place of the worker's earlier one.

        Raises:
            TimeoutError: If the board does not answer.
        """
        self.write(_key(worker), json.dumps([*told.position, told.look]), first=told.look == 0)

    def read(self, worker: int, seconds: float) -> Told | None:
        """Returns what a worker has told; None if the board does not say so in time."""
        text = self.text(_key(worker), seconds)
        if text is None:
            return None
        turns, steps, look = json.loads(text)
        return Told(Position(turns, steps), look)

    def silence(self, worker: int) -> str:
        """Says what the state of a worker may be that tells nothing."""
        return "it does not answer, so it is paused or blocked, or has ended."


class ServiceBoard(Board):
    """TensorFlow's coordination service, in worker 0.

    Args:
        addresses: The addresses of all workers, `host:port`.
        heartbeat_timeout: The seconds after which TensorFlow considers a silent worker lost.
    """

    keeper = 0

    def __init__(self, addresses: Sequence[str], heartbeat_timeout: float) -> None:
        self._addresses = addresses
        self._heartbeat_timeout = heartbeat_timeout

    def write(self, key: str, text: str, *, first: bool) -> None:
        if not first:
            if self.text(key, _ANSWER) is None:  # a write would wait without an end
                raise TimeoutError
            tf_private_files.withdraw(key)
        tf_private_files.announce(key, text)

    def text(self, key: str, seconds: float) -> str | None:
        return tf_private_files.announced(key, seconds)

    def silence(self, worker: int) -> str:
        return (
            f"{_state_at(self._addresses[worker])}. After {self._heartbeat_timeout:g} seconds of "
            "silence it is lost, and the job ends."
        )


class Watchdog:
    """Watches the progress of this worker, in a thread that ends with the process.

    A worker without progress tells its position at each look. One that has waited in a collective
    for long reads the positions of the others, twice. Of the workers that are behind, those that
    have told theirs anew between run; the others do not answer.

    Args:
        progress: How far this worker has come.
        own: The number of this worker.
        names: The names of all workers.
        seconds: The time for which a worker waits before it reports.
        board: The place where workers tell each other their positions.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        progress: Progress,
        own: int,
        names: Sequence[str],
        seconds: float,
        board: Board,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._own = own
        self._names = names
        self._seconds = seconds
        self._board = board
        self._between_looks = min(_LONGEST_LOOK, max(_SHORTEST_LOOK, seconds / _LOOKS_OF_A_STALL))
        self._clock = clock
        self._position = Position(0, 0)
        self._look, self._looked = 0, clock()
        self._waited = 0.0  # seconds without progress
        self._silences = 0  # looks in turn at which the board did not answer
        self._read: list[Told | None] = []
        self._read_at = 0  # the number of a look
        self._settled = False  # whether this stall has been looked into
        self._reported = False
        self._told_of_network = False
        self._end = threading.Event()
        self._tell()

    def start(self) -> None:
        """Watches until the process ends."""
        thread = threading.Thread(target=self._watch, name="gradcomp-watchdog", daemon=True)
        thread.start()

        def stop() -> None:
            self._end.set()
            thread.join(2 * _ANSWER)  # TensorFlow is taken down after this

        atexit.register(stop)

    def _watch(self) -> None:
        try:
            while not self._end.wait(self._between_looks):
                self.look()
        except (tf.errors.OpError, ConnectionError):
            pass  # the job ends, and says why

    def look(self) -> None:
        """Looks at the progress of this worker; reports what it waits for if that takes long."""
        self._look += 1
        elapsed, self._looked = self._clock() - self._looked, self._clock()
        before, self._position = self._position, self._progress.position()
        if self._position.turns != before.turns:
            self._go_on()
            return
        # A longer time is a pause of this worker itself.
        self._waited += min(elapsed, _LOOKS_TO_ANSWER * self._between_looks + _ANSWER)
        self._silences = 0 if self._tell() else self._silences + 1
        if not self._settled and self._position.in_collective and self._waited >= self._seconds:
            self._look_into()

    def _look_into(self) -> None:
        """Reports what this worker waits for, as soon as that is known."""
        keeper = self._board.keeper
        if self._silences:  # nothing is known of the other workers
            if keeper is not None and self._silences >= _LOOKS_TO_ANSWER:
                self._report([self._silent(keeper)])
        elif not self._read:
            self._read, self._read_at = self._read_all(), self._look
        elif self._look >= self._read_at + _LOOKS_TO_ANSWER:
            self._report(self._late())

    def _go_on(self) -> None:
        if self._reported:
            warn_user(f"Goes on, after {self._waited:.0f} seconds.")
        if self._waited:
            self._tell()
        self._waited, self._read = 0.0, []
        self._settled = self._reported = False

    def _tell(self) -> bool:
        """Tells this worker's position; returns False if the service does not answer."""
        try:
            self._board.tell(self._own, Told(self._position, self._look))
        except TimeoutError:
            return False
        return True

    def _read_all(self) -> list[Told | None]:
        workers = range(len(self._names))
        seconds = max(_SHORTEST_LOOK, min(_ANSWER, _ANSWERS / len(workers)))
        return [self._board.read(worker, seconds) for worker in workers]

    def _late(self) -> list[str]:
        """Says of each worker that has not come to this collective what it does."""
        late = []
        for worker, (then, now) in enumerate(zip(self._read, self._read_all(), strict=True)):
            if now is not None and now.position.turns >= self._position.turns:
                continue
            if now is None or then is None or now == then:
                late.append(self._silent(worker))
            else:
                where = _where(now.position)
                late.append(f"{self._names[worker]} has not arrived: it runs, {where}.")
        return late

    def _silent(self, worker: int) -> str:
        return f"{self._names[worker]} has not arrived: {self._board.silence(worker)}"

    def _report(self, late: Sequence[str]) -> None:
        self._settled = True
        if not late:
            if self._told_of_network:  # as it is in each step then
                return
            self._told_of_network = True
            late = ["All workers have arrived: the network is slow or cut."]
        self._reported = True
        waited = f"Waiting for {self._seconds:g} seconds, {_where(self._position)}."
        warn_user(" ".join([waited, *late]))


def _key(worker: int) -> str:
    return f"gradcomp/position/{worker}"


def _where(position: Position) -> str:
    return f"in step {position.steps}" if position.steps else "before the first step"


def _state_at(address: str) -> str:
    """Says what a worker that does not answer may be at: the system accepts for a paused one."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT).close()
    except ConnectionRefusedError:
        return "its process has ended"
    except OSError:
        return "its machine cannot be reached"
    return "its process is there but does not answer, so it is paused or blocked"
