"""Cables of known delay: pairs of tap devices, between which a process carries frames.

Linux's `netem` does the same in the kernel, but not all kernels have it. A frame from the near end
of a cable is delayed or dropped; a frame from the far end is forwarded at once. A packet that
crosses two cables, as in `links.py`, is therefore delayed once in each direction. This module uses
only the standard library.
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
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LONGEST_FRAME = 1 << 16
_AT_ONCE = 64  # frames that are read from an end before the others have their turn
_READY = "ready\n"


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
    namespace: str, made: Sequence[Cable], delay: float, loss: float = 0.0, seed: int = 0
) -> Iterator[None]:
    """Creates cables whose far ends are in a namespace, within this context.

    Args:
        namespace: Name of the namespace.
        made: The cables.
        delay: Seconds that a frame from a near end waits.
        loss: Share of the frames from near ends that are dropped.
        seed: The seed of the random choice of dropped frames.

    Raises:
        OSError: If the devices cannot be made, or the relay ended before its time.
    """
    plan = {"cables": [dataclasses.astuple(one) for one in made], "delay": delay}
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


def missing() -> str:
    """Returns the reason why no relay can run here; empty if there is none."""
    return "" if os.access(_TUN, os.R_OK | os.W_OK) else f"There is no {_TUN} here."


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
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select([*far, *near, until], [], [], rest)[0]:
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


def _main() -> None:
    plan = json.loads(sys.argv[1])
    ends = []
    for one in plan["cables"]:
        cable = Cable(*one)
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
    _main()
