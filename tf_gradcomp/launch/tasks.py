"""Connects the tasks of a scheduler's job, so that they restart their workers together.

Each task has a connection to a hub in the process of task 0. Messages are JSON and carry facts
only: nobody can make a task run anything but its own command. The key of the connections is the
name of the job. It tells jobs apart, but it is no secret.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

_SILENCE = 60  # seconds without an answer, after which a machine is lost
_SIGN_OF_LIFE = 15  # seconds
_TRY_AGAIN = 0.2  # seconds
_NO_ANSWER = "its gradcomp run has ended or cannot be reached"
_BROKEN = (OSError, EOFError)  # errors of a connection that is lost
_STRANGER = (AuthenticationError, AssertionError, KeyError, ValueError)  # not from this job


@dataclass(frozen=True)
class Told:
    """The values that the tasks told each other; all tasks have the same.

    Attributes:
        values: The value of each task, in the order in which the tasks told them.
        lost: A line for each task that is lost, by its rank.
    """

    values: Mapping[int, Any]
    lost: Mapping[int, str]


class _Hub:
    """Tells all tasks which of them have failed, and what they tell, once all of them have.

    A task that loses its connection, or does not connect within `wait` seconds, is lost for good.
    """

    def __init__(self, port: int, key: bytes, size: int, wait: float) -> None:
        self._key, self._size, self._wait = key, size, wait
        self._lock = threading.Lock()  # of everything below
        self._expected = {*range(size)}
        self._lines: dict[int, Connection] = {}
        self._lost: dict[int, str] = {}
        self._failed: set[int] = set()
        self._values: dict[int, Any] = {}
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
        threading.Thread(target=self._run, args=[server], daemon=True).start()

    def _run(self, server: socket.socket) -> None:
        """Accepts connections until all tasks have ended."""
        until = time.monotonic() + self._wait
        server.settimeout(1.0)
        with server:
            while self._expected or self._lines:
                with contextlib.suppress(OSError):  # nobody has come
                    line = _line(server.accept()[0])
                    threading.Thread(target=self._serve, args=[line], daemon=True).start()
                if self._expected and time.monotonic() > until:
                    with self._lock:
                        late = f"it did not connect within {self._wait:g} seconds"
                        self._lost |= dict.fromkeys(self._expected, late)
                        self._expected.clear()
                        self._tell(self._lines)

    def _serve(self, line: Connection) -> None:
        """Takes what one task tells, until it ends; only this thread waits for a stranger."""
        with contextlib.suppress(*_BROKEN, *_STRANGER), line:
            deliver_challenge(line, self._key)
            answer_challenge(line, self._key)
            rank = _receive(line)
            with self._lock:
                self._expected.remove(rank)
                self._lines[rank] = line
                self._tell([rank])  # others may have failed
            try:
                while True:
                    self._take(rank, **_receive(line))
            finally:
                with self._lock:
                    self._lines.pop(rank).close()
                    self._lost[rank] = _NO_ANSWER
                    self._tell(self._lines)

    def _take(self, rank: int, value: Any, failed: bool) -> None:
        with self._lock:
            self._values[rank] = value
            self._failed |= {rank} if failed else set()
            self._tell(self._lines if failed else [])

    def _tell(self, ranks: Collection[int]) -> None:
        """Tells some tasks the news, or all tasks if the values are complete."""
        values: dict[int, Any] = {}
        if len(self._values.keys() | self._lost.keys()) == self._size:
            values, self._values, self._failed, ranks = self._values, {}, set(), self._lines
        news = {
            "values": list(values.items()),
            "lost": list(self._lost.items()),
            "failed": [*self._failed, *self._lost],
        }
        # Task 0 comes last: this process may end as soon as it has the values.
        for rank in sorted(ranks, reverse=True):
            with contextlib.suppress(OSError):  # `_serve` will find the connection lost
                _send(self._lines[rank], news)


class Tasks:
    """A task's connection to all tasks of the job.

    Args:
        rank: The rank of this task.
        size: The number of tasks.
        meeting: The address at which task 0 listens.
        job: A name that distinguishes this job from others.
        wait: The largest difference between the starts of tasks, in seconds.

    Raises:
        RuntimeError: If there is no connection.
    """

    def __init__(self, rank: int, size: int, meeting: str, job: str, wait: float) -> None:
        self._failed: set[int] = set()
        self._told: Told | None = None
        host, _, port = meeting.rpartition(":")
        try:
            if rank == 0:
                _Hub(int(port), job.encode(), size, wait)
                host = "127.0.0.1"
            self._hub = _connect((host.strip("[]"), int(port)), job.encode(), wait)
            _send(self._hub, rank)
        except _BROKEN as error:
            why = str(error) or _NO_ANSWER
            raise RuntimeError(
                f"Rank {rank} could not connect to rank 0 at {meeting}: {why}. Restarts need "
                "this connection: open the port, or leave out --max-restarts."
            ) from error

    def failed(self) -> set[int]:
        """Returns the tasks that have failed since the last exchange, or are lost; does not wait.

        Task 0 is among them if its process has ended.
        """
        try:
            while self._hub.poll():
                self._hear()
        except _BROKEN:
            self._failed.add(0)
        return self._failed

    def exchange(self, value: Any, *, failed: bool = False) -> Told:
        """Tells all tasks a value, and waits for the values of all others.

        Args:
            value: Anything that JSON can represent.
            failed: Whether the others shall know at once that this task's worker has failed.

        Raises:
            RuntimeError: If task 0 has ended.
        """
        try:
            _send(self._hub, {"value": value, "failed": failed})
            while self._told is None:
                self._hear()
        except _BROKEN as error:
            raise RuntimeError(f"Lost rank 0, which leads restarts: {_NO_ANSWER}.") from error
        told, self._told = self._told, None
        return told

    def _hear(self) -> None:
        news = _receive(self._hub)
        self._failed = {*news["failed"]}
        if news["values"]:
            self._told = Told(dict(news["values"]), dict(news["lost"]))


def _connect(place: tuple[str, int], key: bytes, wait: float) -> Connection:
    until = time.monotonic() + wait
    while True:
        try:
            line = _line(socket.create_connection(place, _SILENCE))
            if not line.poll(_SILENCE):
                raise AuthenticationError
            answer_challenge(line, key)
            deliver_challenge(line, key)
            return line
        except _STRANGER as error:
            raise OSError("another job or another program listens there") from error
        except _BROKEN:  # task 0 may start later
            if time.monotonic() > until:
                raise
        time.sleep(_TRY_AGAIN)


def _line(connected: socket.socket) -> Connection:
    """Returns a connection that breaks if the other machine is silent."""
    connected.setblocking(True)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connected.setsockopt(socket.IPPROTO_TCP, option, _SIGN_OF_LIFE)
    # This limits both data that is sent and signs of life.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE)
    return Connection(connected.detach())


def _send(line: Connection, message: Any) -> None:
    line.send_bytes(json.dumps(message).encode())


def _receive(line: Connection) -> Any:
    return json.loads(line.recv_bytes())
