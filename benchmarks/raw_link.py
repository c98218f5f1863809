"""Measures the throughput and the round-trip time of each link, on two workers.

Worker 1 sends as fast as TCP accepts data. Worker 0 counts the bytes. Then it also sends, like the
workers of a collective, and counts again. The output is a line of JSON for each link.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator

import turns

DATA = bytes(1 << 20)
SECONDS = 1.5
SETTLING = 0.5  # seconds in which TCP finds the speed
ROUND_TRIPS = 20


def main() -> None:
    plan = turns.Plan.from_command_line()
    config = json.loads(os.environ["TF_CONFIG"])
    host, port = config["cluster"]["worker"][0].split(":")
    if config["task"]["index"] == 0:
        receive(plan, int(port))
    elif config["task"]["index"] == 1:
        send(plan, host, int(port))


def receive(plan: turns.Plan, port: int) -> None:
    with socket.create_server(("", port)) as server:
        for link in plan.links:
            plan.network.shape(link)
            with server.accept()[0] as sender:
                sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                milliseconds = round_trip(sender)
                count(sender, SETTLING)
                one_way = count(sender, SECONDS)
                with sending(sender):
                    count(sender, SETTLING)
                    both_ways = count(sender, SECONDS)
            speeds = {"Mbit/s": one_way, "Mbit/s both ways": both_ways}
            print(json.dumps({"link": link, **speeds, "ms": milliseconds}))


@contextlib.contextmanager
def sending(connection: socket.socket) -> Iterator[None]:
    """Sends as fast as TCP accepts data within this context, and then shuts down."""

    def send_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(DATA)

    thread = threading.Thread(target=send_all)
    thread.start()
    try:
        yield
    finally:
        connection.shutdown(socket.SHUT_RDWR)
        thread.join()


def round_trip(sender: socket.socket) -> float:
    taken = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        sender.sendall(b".")
        sender.recv(1)
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


def count(sender: socket.socket, seconds: float) -> float:
    """Counts Mbit/s, as they arrive."""
    start = time.perf_counter()
    arrived = 0
    while time.perf_counter() - start < seconds:
        arrived += len(sender.recv(1 << 20))
    return 8e-6 * arrived / (time.perf_counter() - start)


def send(plan: turns.Plan, host: str, port: int) -> None:
    for _ in plan.links:
        with connected(host, port) as receiver:
            receiver.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(ROUND_TRIPS):
                receiver.sendall(receiver.recv(1))
            with contextlib.suppress(OSError), sending(receiver):
                while receiver.recv(len(DATA)):  # until the receiver has enough
                    pass


def connected(host: str, port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:  # the other worker does not listen yet
            time.sleep(0.05)


if __name__ == "__main__":
    main()
