"""Starts the ranks of Horovod jobs."""

import importlib.util
from pathlib import Path

import pytest

from tests.workers import run_workers
from tf_gradcomp.launch import horovod_ranks

PROGRAMS = Path(__file__).parent / "programs"

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None,
    reason="Horovod is not installed; `python3 dev.py test` builds it",
)


def run_ranks(program, n=2, args=(), **kwargs):
    """Runs a program of `programs/` on `n` ranks; the rest is for `run_workers`."""
    with horovod_ranks(n) as each:
        return run_workers(PROGRAMS / program, n, args, per_worker_env=each, **kwargs)
