"""Jobs whose workers are where a network has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from links import Network

from tf_gradcomp.launch import LocalJob


def placed_job(
    command: Sequence[str],
    network: Network,
    threads: int | None,
    on_line: Callable[[int, str, str], None],
    variables: Mapping[str, str] | None = None,
) -> LocalJob:
    """Starts a worker in each place of the network.

    Args:
        command: What each runs.
        network: Where they are.
        threads: Of each worker's operations, in TensorFlow and PyTorch; None leaves it to them.
        on_line: As for `LocalJob`.
        variables: More variables of their environment.
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


def cores() -> int:
    """Returns the number of this machine's cores that the process may use."""
    return len(os.sched_getaffinity(0))


def shared_out_threads(workers: int) -> int:
    """This machine's cores, shared out among the workers."""
    return max(1, cores() // workers)
