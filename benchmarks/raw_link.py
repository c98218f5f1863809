"""Measures the throughput and the round-trip time of each link, on two workers.

Worker 1 sends as fast as TCP accepts data. Worker 0 counts the bytes, and prints a line of JSON for
each link.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time

import turns

SECONDS = 1.5
SETTLING = 0.5  # what TCP takes to find the speed
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
                speed = count(sender, SECONDS)
            print(json.dumps({"link": link, "Mbit/s": speed, "ms": milliseconds}))


def round_trip(sender: socket.socket) -> float:
    taken = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        sender.sendall(b".")
        sender.recv(1)
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


def count(sender: socket.socket, seconds: float) -> float:
    """Mbit/s, as they arrive."""
    start = time.perf_counter()
    arrived = 0
    while time.perf_counter() - start < seconds:
        arrived += len(sender.recv(1 << 20))
    return 8e-6 * arrived / (time.perf_counter() - start)


def send(plan: turns.Plan, host: str, port: int) -> None:
    data = bytes(1 << 20)
    for _ in plan.links:
        with connected(host, port) as receiver:
            receiver.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(ROUND_TRIPS):
                receiver.sendall(receiver.recv(1))
            try:
                while True:
                    receiver.sendall(data)
            except OSError:  # the receiver has enough
                continue


def connected(host: str, port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:  # not there yet
            time.sleep(0.05)


if __name__ == "__main__":
    main()
