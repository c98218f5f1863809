"""Jobs whose workers run in the namespaces of a network, under a setting of malloc.

As a program on two workers, this module measures the throughput and the round-trip time of each
link. Worker 1 sends as fast as TCP accepts data. Worker 0 counts the bytes. Then it also sends,
like the workers of a collective, and counts again. The output is a line of JSON for each link.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
from links import Network
from turns import Plan

from tf_gradcomp.environment import MALLOC
from tf_gradcomp.launch import LocalJob, resources

_DATA = bytes(1 << 20)
_SECONDS = 1.5
_SETTLING = 0.5  # seconds in which TCP finds the speed
_ROUND_TRIPS = 20

SETTINGS = {
    name: {resources.TUNABLES: "", **resources.malloc_settings({MALLOC: name})}
    for name in (resources.DEFAULT, resources.TUNED)
}

malloc_option = click.option(
    "--malloc",
    "mallocs",
    type=click.Choice(list(SETTINGS)),
    multiple=True,
    default=tuple(SETTINGS),
    show_default=True,
    help="The settings of malloc to measure under.",
)


def placed_job(
    command: Sequence[str],
    network: Network,
    threads: int | None,
    on_line: Callable[[int, str, str], None],
    variables: Mapping[str, str] | None = None,
) -> LocalJob:
    """Starts a worker in each namespace of the network.

    Args:
        command: The command of each worker.
        network: The network.
        threads: The threads of each worker's operations in TensorFlow and PyTorch; None keeps their
            defaults.
        on_line: As for `LocalJob`.
        variables: Additional environment variables of the workers.
    """
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **(variables or {})}
    if threads:
        env |= {"TF_NUM_INTRAOP_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    return LocalJob(
        command,
        network.workers,
        env=env,
        worker_prefix=network.prefixes,
        hosts=network.hosts,
        on_line=on_line,
    )


def measured_links(network: Network, links: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the measured speed of each link, between two workers of the network.

    Raises:
        RuntimeError: If it fails.
    """
    measured = []

    def on_line(worker: int, stream: str, line: str) -> None:
        if (worker, stream) == (0, "stdout"):
            measured.append(json.loads(line))

    command = [sys.executable, __file__, Plan("raw link", (), links, network).to_text()]
    with placed_job(command, network, None, on_line) as job:
        result = job.run()
    if result.exit_code:
        raise RuntimeError("\n".join(["The links were not measured.", *result.summary()]))
    return measured


def cores() -> int:
    """Returns the number of this machine's cores that the process may use."""
    return len(os.sched_getaffinity(0))


def shared_out_threads(workers: int) -> int:
    """This machine's cores, shared out among the workers."""
    return max(1, cores() // workers)


def _receive(plan: Plan, port: int) -> None:
    with socket.create_server(("", port)) as server:
        for link in plan.links:
            plan.network.shape(link)
            with server.accept()[0] as sender:
                sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                milliseconds = _round_trip(sender)
                _count(sender, _SETTLING)
                one_way = _count(sender, _SECONDS)
                with _sending(sender):
                    _count(sender, _SETTLING)
                    both_ways = _count(sender, _SECONDS)
            speeds = {"Mbit/s": one_way, "Mbit/s both ways": both_ways}
            print(json.dumps({"link": link, **speeds, "ms": milliseconds}))


@contextlib.contextmanager
def _sending(connection: socket.socket) -> Iterator[None]:
    """Sends as fast as TCP accepts data within this context, and then shuts down."""

    def send_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(_DATA)

    thread = threading.Thread(target=send_all)
    thread.start()
    try:
        yield
    finally:
        connection.shutdown(socket.SHUT_RDWR)
        thread.join()


def _round_trip(sender: socket.socket) -> float:
    taken = []
    for _ in range(_ROUND_TRIPS):
        start = time.perf_counter()
        sender.sendall(b".")
        sender.recv(1)
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


def _count(sender: socket.socket, seconds: float) -> float:
    """Counts Mbit/s, as they arrive."""
    start = time.perf_counter()
    arrived = 0
    while time.perf_counter() - start < seconds:
        arrived += len(sender.recv(1 << 20))
    return 8e-6 * arrived / (time.perf_counter() - start)


def _send(plan: Plan, host: str, port: int) -> None:
    for _ in plan.links:
        with connected(host, port) as receiver:
            receiver.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_ROUND_TRIPS):
                receiver.sendall(receiver.recv(1))
            with contextlib.suppress(OSError), _sending(receiver):
                while receiver.recv(len(_DATA)):  # until the receiver has enough
                    pass


def connected(host: str, port: int) -> socket.socket:
    """Connects to a server that may not listen yet."""
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            time.sleep(0.05)


def _measure_link() -> None:
    plan = Plan.from_command_line()
    config = json.loads(os.environ["TF_CONFIG"])
    host, port = config["cluster"]["worker"][0].split(":")
    if config["task"]["index"] == 0:
        _receive(plan, int(port))
    elif config["task"]["index"] == 1:
        _send(plan, host, int(port))


if __name__ == "__main__":
    _measure_link()
