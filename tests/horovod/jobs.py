"""Starts the ranks of Horovod jobs."""

import importlib.util

import numpy as np
import pytest

from tests.workers import run_workers
from tf_gradcomp.launch import horovod_ranks

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None,
    reason="Horovod is not installed; `python3 dev.py test` builds it",
)


def run_ranks(program, n=2, args=(), **kwargs):
    """Runs a program on `n` ranks; takes the arguments of `run_workers`."""
    with horovod_ranks(n) as each:
        return run_workers(program, n, args, per_worker_env=each, **kwargs)


def only(results):
    """Returns the value of all ranks, which must be the same."""
    assert all(rank == results[0] for rank in results)
    return results[0]


def largest_difference(left, right):
    pairs = zip(left, right, strict=True)
    return max(np.abs(np.array(a) - np.array(b)).max(initial=0) for a, b in pairs)
