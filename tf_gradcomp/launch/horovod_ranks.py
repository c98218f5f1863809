"""Starts ranks of Horovod on this machine as `horovodrun --gloo` does, under our own launcher."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tf_gradcomp.horovod_here import HOW_TO_BUILD

_THIS_MACHINE, _LOOPBACK = "127.0.0.1", "lo"


@contextlib.contextmanager
def horovod_ranks(ranks: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each rank; within this context, a server connects the ranks."""
    try:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
        from horovod.runner.http.http_server import RendezvousServer
    except ImportError as error:
        raise ImportError(HOW_TO_BUILD % error) from error
    slots = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
    server = RendezvousServer()
    of_job = create_run_env_vars(_THIS_MACHINE, [_LOOPBACK], server.start())
    server.init(slots)
    try:
        yield [
            {name: str(value) for name, value in {**of_job, **create_slot_env_vars(slot)}.items()}
            for slot in slots
        ]
    finally:
        server.stop()
