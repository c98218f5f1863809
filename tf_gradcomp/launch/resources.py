"""What the workers of this machine get of it: ports, GPUs, memory, and ranks of Horovod."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from tf_gradcomp.environment import MALLOC
from tf_gradcomp.horovod_here import HOW_TO_BUILD

_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_LIST_GPUS = ("nvidia-smi", "--list-gpus")
TUNABLES = "GLIBC_TUNABLES"
TUNED, DEFAULT = "tuned", "default"
# By default `malloc` maps new pages for each large tensor, the kernel fills the pages with zeros on
# first use, and `free` unmaps them. In a training step that may take longer than the arithmetic.
_TUNED = (
    "glibc.malloc.hugetlb=1",  # ask for huge pages
    "glibc.malloc.mmap_max=0",  # take large tensors from the heap
    "glibc.malloc.trim_threshold=1000000000000",  # keep freed memory
    "glibc.malloc.arena_max=1",  # let threads reuse each other's memory
)


class ReservedPorts:
    """Ports that no other process gets while the workers start.

    A worker binds its port seconds after it was chosen, when TensorFlow is loaded. Until then, the
    system could give the port to any outgoing connection. Each port therefore stays bound here by a
    socket that does not listen. On such a port, Linux lets a server with SO_REUSEADDR listen, as
    every gRPC server does, but gives the port to no process that asks for any free port. If the
    system does not allow this, the port is released at once, and a short race remains.

    Args:
        hosts: For each port to reserve, the name by which other workers reach this machine.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._sockets = [_bind(0) for _ in hosts]
        ports = [bound.getsockname()[1] for bound in self._sockets]
        self.addresses = tuple(f"{host}:{port}" for host, port in zip(hosts, ports, strict=True))
        if not all(_can_listen(port) for port in ports):
            self.release()

    def release(self) -> None:
        """Releases the ports."""
        for bound in self._sockets:
            bound.close()
        self._sockets = []


def _bind(port: int) -> socket.socket:
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # On all interfaces, like TensorFlow's server, which ignores the host in its address.
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound


def _can_listen(port: int) -> bool:
    try:
        with _bind(port) as server:
            server.listen()
    except OSError:
        return False
    return True


def gpus_of_workers(
    workers: int, gpus_per_worker: int, env: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """Returns the variables that give workers their own GPUs: neighbours, in workers' order.

    If `env` lists the visible GPUs, only these are divided; otherwise all GPUs are.

    Raises:
        ValueError: If there are too few.
    """
    gpus, source = _visible_gpus(env)
    if len(gpus) < workers * gpus_per_worker:
        count = f"{gpus_per_worker} GPU{'s' if gpus_per_worker > 1 else ''}"
        raise ValueError(
            f"{workers} workers with {count} each need {workers * gpus_per_worker}, but this "
            f"machine has {len(gpus)}: {source}."
        )
    starts = range(0, workers * gpus_per_worker, gpus_per_worker)
    return [{_VISIBLE_GPUS: ",".join(gpus[start : start + gpus_per_worker])} for start in starts]


def _visible_gpus(env: Mapping[str, str]) -> tuple[list[str], str]:
    """Returns the usable GPUs, in the names of CUDA's variable, and the source of the list."""
    text = env.get(_VISIBLE_GPUS)
    if text is not None:
        names = [name.strip() for name in text.split(",")]
        # As in CUDA: all names after an unknown GPU are ignored.
        end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        return names[:end], f"{_VISIBLE_GPUS} is {text!r}"
    try:
        listed = subprocess.run(
            _LIST_GPUS, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError as error:
        return [], f"{_LIST_GPUS[0]}, which lists them, cannot be started ({error.strerror})"
    # The parts of a split GPU (MIG) are on separate, indented lines.
    gpus = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    if listed.returncode:
        return [], f"{_LIST_GPUS[0]} says {(listed.stdout + listed.stderr).strip()!r}"
    return [str(number) for number in range(len(gpus))], f"{_LIST_GPUS[0]} lists them"


def malloc_settings(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment variables that tune the `malloc` of a worker's GNU C library.

    `GRADCOMP_MALLOC=default` turns the tuning off, and the user's own `GLIBC_TUNABLES` wins.

    Raises:
        ValueError: If GRADCOMP_MALLOC has another value.
    """
    setting = env.get(MALLOC, TUNED)
    if setting not in (TUNED, DEFAULT):
        raise ValueError(f"{MALLOC}: expected {TUNED} or {DEFAULT}; received {setting!r}.")
    if setting == DEFAULT or TUNABLES in env:
        return {}
    return {TUNABLES: ":".join(_TUNED)}


@contextlib.contextmanager
def horovod_ranks(ranks: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each rank of Horovod on this machine, as `horovodrun --gloo` sets it.

    Within this context, a server connects the ranks.
    """
    try:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
        from horovod.runner.http.http_server import RendezvousServer
    except ImportError as error:
        raise ImportError(HOW_TO_BUILD % error) from error
    slots = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
    server = RendezvousServer()
    job_env = create_run_env_vars("127.0.0.1", ["lo"], server.start())
    server.init(slots)
    try:
        yield [
            {name: str(value) for name, value in {**job_env, **create_slot_env_vars(slot)}.items()}
            for slot in slots
        ]
    finally:
        server.stop()
