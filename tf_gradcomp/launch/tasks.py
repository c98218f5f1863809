"""Connects the tasks of a scheduler's job, so that they restart their workers together.

Each task has a connection to a hub in the process of task 0. Messages are lines of JSON, and carry
facts only: nobody can make a task run anything but its own command.
"""

from __future__ import annotations

import contextlib
import json
import select
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_SILENCE = 60  # seconds without an answer, after which a machine is lost
_SIGN_OF_LIFE = 15  # seconds
_CHUNK = 1 << 16
_TRY_AGAIN = 0.2  # seconds
_NO_ANSWER = "its gradcomp run has ended or cannot be reached"


@dataclass(frozen=True)
class Told:
    """The values that the tasks told each other; all tasks have the same.

    Attributes:
        values: The value of each task, in the order in which the tasks told them.
        lost: A line for each task that is lost, by its rank.
    """

    values: Mapping[int, Any]
    lost: Mapping[int, str]


class _Line:
    """A connection that carries messages."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._open = b""
        connected.settimeout(_SILENCE)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _SIGN_OF_LIFE),
            (socket.TCP_KEEPINTVL, _SIGN_OF_LIFE),
            (socket.TCP_KEEPCNT, _SILENCE // _SIGN_OF_LIFE - 1),
            (socket.TCP_USER_TIMEOUT, 1000 * _SILENCE),
        ):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; raises OSError if the connection is lost."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Waits for data; returns the complete messages; raises OSError without a connection."""
        chunk = self.socket.recv(_CHUNK)
        if not chunk:
            raise ConnectionResetError("the connection was closed")
        *lines, self._open = (self._open + chunk).split(b"\n")
        return [json.loads(line) for line in lines]


@dataclass
class _Hub:
    """Passes on what tasks tell, once all of them have.

    A task that loses its connection, or does not connect within `wait` seconds, is lost for good.
    """

    listener: socket.socket
    job: str
    size: int
    wait: float
    lines: dict[int, _Line] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Serves the tasks until all of them have ended."""
        until = time.monotonic() + self.wait
        with self.listener, selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            while len(self.lost) < self.size:
                for key, _ in selector.select(1.0):
                    if key.data is None:
                        with contextlib.suppress(OSError):
                            line = _Line(self.listener.accept()[0])
                            selector.register(line.socket, selectors.EVENT_READ, line)
                    elif not self._hear(key.data):
                        selector.unregister(key.data.socket)
                        key.data.socket.close()
                if time.monotonic() > until:
                    for rank in {*range(self.size)} - {*self.lines} - {*self.lost}:
                        self.lost[rank] = f"it did not connect within {self.wait:g} seconds"
                self._answer()

    def _hear(self, line: _Line) -> bool:
        """Takes messages; returns whether the connection shall stay."""
        rank = next((rank for rank, known in self.lines.items() if known is line), None)
        try:
            messages = line.receive()
        except (OSError, ValueError):
            if rank is not None:
                self._lose(rank)
            return False
        for message in messages:
            if rank is None:
                rank = self._welcome(line, message)
                if rank is None:
                    return False
                continue
            self.values[rank] = message["value"]
            if message["failed"]:
                self._send({"failed": rank}, {*self.lines} - {rank})
        return True

    def _welcome(self, line: _Line, message: Any) -> int | None:
        """Returns the rank of a new connection; None if it is not from a task that is expected."""
        for rank in {*range(self.size)} - {*self.lines} - {*self.lost}:
            if message == _greeting(self.job, rank):
                self.lines[rank] = line
                return rank
        return None

    def _lose(self, rank: int) -> None:
        del self.lines[rank]
        self.lost[rank] = _NO_ANSWER
        self._send({"failed": rank}, self.lines)

    def _send(self, message: dict[str, Any], ranks: Iterable[int]) -> None:
        # Task 0 comes last: this process may end as soon as it has the message.
        for rank in sorted(ranks, reverse=True):
            with contextlib.suppress(OSError):  # `_hear` will find the connection lost
                self.lines[rank].send(message)

    def _answer(self) -> None:
        missing = {*range(self.size)} - {*self.values} - {*self.lost}
        if self.values and not missing:
            values, self.values = self.values, {}
            self._send(
                {"values": list(values.items()), "lost": list(self.lost.items())}, self.lines
            )


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
        place = host.strip("[]"), int(port)
        try:
            if rank == 0:
                place = _start_hub(place[1], job, size, wait)
            self._line = _Line(_connect(place, wait))
            self._line.send(_greeting(job, rank))
        except OSError as error:
            raise RuntimeError(
                f"Rank {rank} could not connect to rank 0 at {meeting}: {error}. Restarts need "
                "this connection: open the port, or leave out --max-restarts."
            ) from error

    def failed(self) -> set[int]:
        """Returns the tasks that have failed since the last exchange, or are lost; does not wait.

        Task 0 is among them if its process has ended.
        """
        try:
            while select.select([self._line.socket], [], [], 0)[0]:
                self._hear()
        except OSError:
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
            self._line.send({"value": value, "failed": failed})
            while self._told is None:
                select.select([self._line.socket], [], [])
                self._hear()
        except OSError as error:
            raise RuntimeError(f"Lost rank 0, which leads restarts: {_NO_ANSWER}.") from error
        told, self._told = self._told, None
        return told

    def _hear(self) -> None:
        for message in self._line.receive():
            if "failed" in message:
                self._failed.add(message["failed"])
            else:
                self._told = Told(dict(message["values"]), dict(message["lost"]))
                self._failed.clear()


def _greeting(job: str, rank: int) -> dict[str, Any]:
    return {"job": job, "rank": rank}


def _start_hub(port: int, job: str, size: int, wait: float) -> tuple[str, int]:
    listener = socket.create_server(("", port))
    threading.Thread(target=_Hub(listener, job, size, wait).run, daemon=True).start()
    return "127.0.0.1", port


def _connect(place: tuple[str, int], wait: float) -> socket.socket:
    until = time.monotonic() + wait
    while True:
        try:
            return socket.create_connection(place, _SILENCE)
        except OSError:  # task 0 may start later
            if time.monotonic() > until:
                raise
        time.sleep(_TRY_AGAIN)
