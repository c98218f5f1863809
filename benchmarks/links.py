"""Links of known speed: each worker has a network namespace, behind a shaped veth.

    worker 0: veth ── port0 ┐                       ┌ port1 ── veth :worker 1
                            └ bridge, its namespace ┘

Both ends of each veth are shaped, so that a worker's sending and receiving are both limited. If
links have a delay, or lose packets, a cable replaces each veth: a pair of tap devices, between
which this module, as a program, carries frames. Linux's `netem` does the same in the kernel, but
not all kernels have it. A frame from the near end of a cable is delayed or dropped; a frame from
the far end is forwarded at once. A packet that crosses two cables is therefore delayed once in each
direction.

This module uses only the standard library, because the workers of other frameworks also import it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

SPEEDS = {"10 Mbit/s": "10mbit", "100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit"}
UNSHAPED = "unshaped"
LOOPBACK = "loopback"

# A larger burst would let a compressed step leave at line rate.
_TBF = ("burst", "16k", "latency", "50ms")
_INTERFACE = "veth"  # also of a cable's near end
# Horovod resolves its host's name, which must have an address in this network.
_NAMED = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
_HEADERS = 14 + 20 + 32  # headers of each packet: Ethernet, IPv4, and TCP with timestamps
_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LONGEST_FRAME = 1 << 16
_AT_ONCE = 64  # frames that are read from an end before the others have their turn
_READY = "ready\n"
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
            of_relay = [Cable(*three) for three in ends]
            return cables(self._bridge, of_relay, delay, loss)
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
    if (delay or loss) and not os.access(_TUN, os.R_OK | os.W_OK):
        return f"Links cannot be delayed here: there is no {_TUN}."
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
    created = Network(workers, f"gradcomp-{os.getpid()}-{workers}")
    with _ending_by_exception(), contextlib.ExitStack() as cleaned_up:
        cleaned_up.callback(created.remove)
        try:
            cleaned_up.enter_context(created.create(delay, loss))
            created.connect()
            yield created
        finally:
            for signum in _ENDING:
                signal.signal(signum, signal.SIG_IGN)


@contextlib.contextmanager
def _ending_by_exception() -> Iterator[None]:
    """Turns signals that end the program into exceptions, so that the network is removed."""
    before = {signum: signal.getsignal(signum) for signum in _ENDING}
    for signum in _ENDING:
        if signum != signal.SIGINT:
            signal.signal(signum, lambda received, _frame: sys.exit(128 + received))
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


@dataclasses.dataclass(frozen=True)
class Cable:
    """A cable between two network namespaces.

    Attributes:
        near: Name of the device at the near end.
        namespace: Namespace of the near end; the relay's own namespace has the far end.
        far: Name of the device at the far end.
    """

    near: str
    namespace: str
    far: str


@contextlib.contextmanager
def cables(
    namespace: str, pairs: Sequence[Cable], delay: float, loss: float = 0.0, seed: int = 0
) -> Iterator[None]:
    """Creates cables whose far ends are in a namespace, within this context.

    Args:
        namespace: Name of the namespace.
        pairs: The cables.
        delay: Seconds that a frame from a near end waits.
        loss: Share of the frames from near ends that are dropped.
        seed: The seed of the random choice of dropped frames.

    Raises:
        OSError: If the devices cannot be made, or the relay ended before its time.
    """
    plan = {"cables": [dataclasses.astuple(cable) for cable in pairs], "delay": delay}
    plan |= {"loss": loss, "seed": seed}
    command = ["ip", "netns", "exec", namespace, sys.executable, __file__, json.dumps(plan)]
    # The relay ignores the terminal's signals, because the program that uses the cables handles
    # them. The end of this program closes the pipe.
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as relay:
        assert relay.stdout is not None
        if relay.stdout.readline() != _READY:
            raise OSError(f"the relay did not start: {relay.communicate()[1].strip()}")
        yield
        _, error = relay.communicate()
    if relay.returncode:
        raise OSError(f"the relay ended amid its work: {error.strip()}")


def carry(
    ends: Sequence[tuple[int, int]], delay: float, loss: float, chance: random.Random, until: int
) -> None:
    """Carries frames between the two ends of each cable, until a file or pipe ends.

    Args:
        ends: File descriptors of the near and the far end of each cable; they do not block.
        delay: Seconds that a frame from a near end waits.
        loss: Share of the frames from near ends that are dropped.
        chance: Decides which frames are dropped.
        until: File descriptor of the file or pipe.
    """
    far, near = dict(ends), {far: near for near, far in ends}
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()  # by time
    while True:
        seconds_left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select([*far, *near, until], [], [], seconds_left)[0]:
            if end == until:
                return
            for frame in _frames(end):
                if end in near:
                    _pass_on(near[end], frame)
                elif chance.random() >= loss:
                    waiting.append((time.monotonic() + delay, far[end], frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, end, frame = waiting.popleft()
            _pass_on(end, frame)


def _frames(end: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        for _ in range(_AT_ONCE):
            yield os.read(end, _LONGEST_FRAME)


def _pass_on(end: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the device is down, or has no room: the frame is lost
        os.write(end, frame)


def _relay() -> None:
    plan = json.loads(sys.argv[1])
    ends = []
    for fields in plan["cables"]:
        cable = Cable(*fields)
        ends.append((_tap(cable.near), _tap(cable.far)))
        _move(cable.near, cable.namespace)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # the relay must not wait for a core
    sys.stdout.write(_READY)
    sys.stdout.flush()
    chance = random.Random(plan["seed"])
    carry(ends, plan["delay"], plan["loss"], chance, sys.stdin.fileno())


def _tap(name: str) -> int:
    """Creates a tap device; returns its file descriptor, whose closing removes the device."""
    tap = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def _move(device: str, namespace: str) -> None:
    subprocess.run(["ip", "link", "set", "dev", device, "netns", namespace], check=True)


if __name__ == "__main__":
    _relay()
