"""Jobs whose workers run in the namespaces of a network."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from links import Network
from turns import Plan

from tf_gradcomp.launch import LocalJob


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
    """Returns the measurements of `raw_link.py` on each link, between two workers of the network.

    Raises:
        RuntimeError: If it fails.
    """
    measured = []

    def on_line(worker: int, stream: str, line: str) -> None:
        if (worker, stream) == (0, "stdout"):
            measured.append(json.loads(line))

    program = Path(__file__).with_name("raw_link.py")
    command = [sys.executable, str(program), Plan("raw link", (), links, network).to_text()]
    with placed_job(command, network, None, on_line) as job:
        result = job.run()
    if result.exit_code:
        raise RuntimeError("\n".join([f"{program.name}:", *result.summary()]))
    return measured


def cores() -> int:
    """Returns the number of this machine's cores that the process may use."""
    return len(os.sched_getaffinity(0))


def shared_out_threads(workers: int) -> int:
    """This machine's cores, shared out among the workers."""
    return max(1, cores() // workers)
