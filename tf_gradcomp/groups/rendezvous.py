"""Waits until all workers of a job have started, and reports which have not."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping

from tf_gradcomp.environment import bypass, proxy_variable
from tf_gradcomp.groups.messages import log_warning
from tf_gradcomp.stall_reports import continues, waits
from tf_gradcomp.tf_config import TFConfig, host_of

_CONNECT = 1.0  # seconds
_FIRST_REPORT, _BETWEEN_REPORTS = 15.0, 60.0  # seconds
_LONGEST_PAUSE = 1.0  # seconds between two rounds of connections
_BACKLOG = 4096  # connections, so that nobody has to accept those of the other workers


def wait_for_workers(task: TFConfig, limit: float) -> None:
    """Waits until this worker has reached each other worker once.

    TensorFlow would wait for them without a word, and no signal ends its wait. Until this worker
    has reached all others, it listens at its own port. Then TensorFlow's server listens there, so
    slower workers reach this one as well.

    Args:
        task: The cluster, and this process's task in it.
        limit: The seconds to wait.

    Raises:
        TimeoutError: If a worker cannot be reached in this time.
    """
    if task.rank is None or task.num_workers == 1:
        return
    started, next_report = time.monotonic(), _FIRST_REPORT
    missing = dict(enumerate(task.worker_addresses))
    local_address = missing.pop(task.rank)
    with _listening(local_address):
        while errors := {rank: connection_error(missing[rank]) for rank in missing}:
            missing = {rank: missing[rank] for rank, error in errors.items() if error}
            waited = time.monotonic() - started
            if missing and waited >= limit:
                raise TimeoutError(
                    "MultiWorkerMirroredStrategy: some workers have not started within "
                    f"{limit:g} seconds. {' '.join(_describe(missing, errors))} Start them, or set "
                    "another limit by GRADCOMP_START_TIMEOUT=SECONDS in the environment of all "
                    "workers."
                )
            if missing and waited >= next_report:
                for line in _describe(missing, errors):
                    log_warning(f"{waits(round(waited), 0)} {line}")
                next_report += _BETWEEN_REPORTS
            if missing:
                time.sleep(min(_LONGEST_PAUSE, 0.05 + waited / 10))
    if next_report > _FIRST_REPORT:
        log_warning(continues(time.monotonic() - started))


def warn_of_proxy(task: TFConfig) -> None:
    """Warns if TensorFlow would connect the workers through a proxy."""
    for name, value in bypass([host_of(address) for address in task.worker_addresses]).items():
        log_warning(
            f"the environment variable {proxy_variable()} names a proxy, and {name} does not "
            "except all workers, so TensorFlow connects the workers through the proxy. If the job "
            f"does not start, set {name}={value} in the environment of all workers."
        )


def connection_error(address: str) -> OSError | None:
    """Connects to `host:port`; returns the error, or None if somebody listens there.

    Linux accepts connections for a paused process, too.
    """
    try:
        port = int(address.rpartition(":")[2])
        socket.create_connection((host_of(address), port), _CONNECT).close()
    except OSError as error:
        return error
    return None


def _describe(missing: Mapping[int, str], errors: Mapping[int, OSError | None]) -> list[str]:
    return [
        f"Worker {rank} ({address}) has not started: {_explain(errors[rank], address)}."
        for rank, address in missing.items()
    ]


def _explain(error: OSError | None, address: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {host_of(address)} cannot be found"
    if isinstance(error, ConnectionRefusedError):
        return "its machine refuses the connection, so no process listens at this port"
    if isinstance(error, TimeoutError):
        return "its machine does not answer"
    return f"the connection fails ({error})"


def _listening(address: str) -> contextlib.AbstractContextManager[object]:
    """Listens on all interfaces, as TensorFlow's server does; not if another process does.

    TensorFlow then ends with an error of its own.
    """
    ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    socket_address = ("", int(address.rpartition(":")[2]))
    try:
        return socket.create_server(
            socket_address, family=family, backlog=_BACKLOG, dualstack_ipv6=ipv6
        )
    except OSError:
        return contextlib.nullcontext()
