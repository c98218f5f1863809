"""Starts the ranks of Horovod jobs as `horovodrun --gloo` does: by its server and variables."""

import importlib.util
from pathlib import Path

import pytest

from tests.workers import run_workers

PROGRAMS = Path(__file__).parent / "programs"

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None,
    reason="Horovod is not installed; `python3 dev.py test` builds it",
)


def run_ranks(program, n=2, args=(), **kwargs):
    """Runs a program of `programs/` on `n` ranks; the rest is that of `run_workers`."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    slots = get_host_assignments(parse_hosts(f"localhost:{n}"), n)
    port = server.start()
    server.init(slots)
    of_job = create_run_env_vars("127.0.0.1", ["lo"], port)
    each = [
        {name: str(value) for name, value in {**of_job, **create_slot_env_vars(slot)}.items()}
        for slot in slots
    ]
    try:
        return run_workers(PROGRAMS / program, n, args, per_worker_env=each, **kwargs)
    finally:
        server.stop()
