"""Links of known speed: each worker has a network namespace, behind a shaped veth.

    worker 0: veth ── port0 ┐                       ┌ port1 ── veth :worker 1
                            └ bridge, its namespace ┘

Both ends of each veth are shaped, so that a worker's sending and receiving are both limited. If
links have a delay, or lose packets, a cable of `relay.py` replaces each veth. This module uses only
the standard library, because the workers of other frameworks also import it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import relay

SPEEDS = {"10 Mbit/s": "10mbit", "100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit"}
UNSHAPED = "unshaped"
LOOPBACK = "loopback"

# A larger burst would let a compressed step leave at line rate.
_TBF = ("burst", "16k", "latency", "50ms")
_INTERFACE = "veth"  # also of a cable's near end
# Horovod resolves its host's name, which must have an address in this network.
_NAMED = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
_HEADERS = 14 + 20 + 32  # headers of each packet: Ethernet, IPv4, and TCP with timestamps
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True)
class Counters:
    """The bytes that a worker's interface has sent so far: in total, and TCP's data."""

    all: float
    carried: float

    def since(self, earlier: Counters) -> Counters:
        """Returns the bytes sent after `earlier`."""
        return Counters(self.all - earlier.all, self.carried - earlier.carried)


@dataclasses.dataclass(frozen=True)
class Network:
    """The network of a job's workers.

    Attributes:
        workers: The number of workers.
        name: The prefix of the namespaces' names; None for the loopback of this machine.
    """

    workers: int
    name: str | None = None

    @property
    def hosts(self) -> list[str] | None:
        """For `LocalJob`."""
        return [f"10.78.0.{i + 1}" for i in range(self.workers)] if self.name else None

    @property
    def prefixes(self) -> list[list[str]] | None:
        """For `LocalJob`."""
        if not self.name:
            return None
        return [
            ["ip", "netns", "exec", self._namespace(i), *_NAMED, host]
            for i, host in enumerate(self.hosts or ())
        ]

    @property
    def interface(self) -> str:
        """The name of the interface by which a worker sends, in the worker's namespace."""
        return _INTERFACE if self.name else "lo"

    def shape(self, link: str) -> None:
        """Gives all links the speed of this name; any worker may call it."""
        for i in range(self.workers if self.name else 0):
            for namespace, interface in (
                (self._namespace(i), _INTERFACE),
                (self._bridge, _port(i)),
            ):
                qdisc = ["dev", interface, "root"]
                if link in SPEEDS:
                    _run(
                        "tc",
                        "-n",
                        namespace,
                        "qdisc",
                        "replace",
                        *qdisc,
                        "tbf",
                        "rate",
                        SPEEDS[link],
                        *_TBF,
                    )
                elif _is_shaped(namespace, interface):
                    _run("tc", "-n", namespace, "qdisc", "del", *qdisc)

    def counters(self) -> Counters:
        """Returns the bytes that this worker has sent; on the loopback, the mean of all workers."""
        folder = Path("/sys/class/net", self.interface, "statistics")
        sent, packets = (int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets"))
        sharing = 1 if self.name else self.workers
        return Counters(sent / sharing, (sent - _HEADERS * packets) / sharing)

    @property
    def _bridge(self) -> str:
        return f"{self.name}-bridge"

    def _namespace(self, worker: int) -> str:
        return f"{self.name}-{worker}"

    @property
    def _namespaces(self) -> list[str]:
        return [self._bridge, *map(self._namespace, range(self.workers))]

    def create(self, delay: float, loss: float) -> AbstractContextManager[None]:
        """Creates and connects the namespaces; returns the context of the network."""
        for namespace in self._namespaces:
            _run("ip", "netns", "add", namespace)
        ends = [(_INTERFACE, self._namespace(i), _port(i)) for i in range(self.workers)]
        if delay or loss:
            of_relay = [relay.Cable(*three) for three in ends]
            return relay.cables(self._bridge, of_relay, delay, loss)
        for near, worker, far in ends:
            peer = ["peer", "name", near, "netns", worker]
            _run("ip", "-n", self._bridge, "link", "add", far, "type", "veth", *peer)
        return contextlib.nullcontext()

    def connect(self) -> None:
        """Gives all workers their addresses, and connects their cables."""
        _run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._bridge, "link", "set", "dev", "bridge", "up")
        for i, host in enumerate(self.hosts or ()):
            worker, port = self._namespace(i), _port(i)
            _run("ip", "-n", self._bridge, "link", "set", "dev", port, "master", "bridge", "up")
            _run("ip", "-n", worker, "addr", "add", f"{host}/24", "dev", _INTERFACE)
            for interface in ("lo", _INTERFACE):
                _run("ip", "-n", worker, "link", "set", "dev", interface, "up")

    def cut(self, worker: int) -> None:
        """Disconnects a worker: its packets get lost in both directions, but its link stays up."""
        _run("ip", "-n", self._bridge, "link", "set", "dev", _port(worker), "nomaster")

    def rejoin(self, worker: int) -> None:
        """Reconnects a disconnected worker."""
        _run("ip", "-n", self._bridge, "link", "set", "dev", _port(worker), "master", "bridge")

    def remove(self) -> None:
        """Removes the namespaces, and with them their interfaces, of a partial network, too."""
        there = {entry["name"] for entry in json.loads(_run("ip", "-json", "netns") or "[]")}
        for namespace in self._namespaces:
            if namespace in there:
                _run("ip", "netns", "del", namespace)


def missing(delay: float = 0.0, loss: float = 0.0) -> str:
    """Returns the reason why links cannot be shaped here; empty if they can."""
    if os.geteuid() != 0:
        return "Only root can make network namespaces."
    commands = [command for command in ("ip", "tc", "unshare") if not shutil.which(command)]
    if commands:
        absent = " and no ".join(commands)
        return f"There is no {absent} here; Debian has them in iproute2 and util-linux."
    if (delay or loss) and relay.missing():
        return f"Links cannot be delayed here: {relay.missing()}"
    try:
        with network(1, delay, loss) as probe:
            probe.shape("100 Mbit/s")
    except OSError as error:  # in a container, say
        return f"Links cannot be shaped here: {error}."
    return ""


@contextlib.contextmanager
def network(workers: int, delay: float = 0.0, loss: float = 0.0) -> Iterator[Network]:
    """Yields a network of namespaces, and removes it at the end of the context.

    Args:
        workers: The number of workers.
        delay: The delay of packets between two workers, in seconds.
        loss: Share of these packets that do not arrive.
    """
    made = Network(workers, f"gradcomp-{os.getpid()}-{workers}")
    with _ending_by_exception(), contextlib.ExitStack() as cleaned_up:
        cleaned_up.callback(made.remove)
        try:
            cleaned_up.enter_context(made.create(delay, loss))
            made.connect()
            yield made
        finally:
            for signum in _ENDING:
                signal.signal(signum, signal.SIG_IGN)


@contextlib.contextmanager
def _ending_by_exception() -> Iterator[None]:
    """Turns signals that end the program into exceptions, so that the network is removed."""
    before = {signum: signal.getsignal(signum) for signum in _ENDING}
    for signum in _ENDING:
        if signum != signal.SIGINT:
            signal.signal(signum, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _port(worker: int) -> str:
    return f"port{worker}"


def _is_shaped(namespace: str, interface: str) -> bool:
    shown = json.loads(_run("tc", "-json", "-n", namespace, "qdisc", "show", "dev", interface))
    return any(qdisc["kind"] == "tbf" for qdisc in shown)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
