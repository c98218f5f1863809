"""Environment variables that change the behaviour of an unchanged program, and proxies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

PREFIX = "GRADCOMP_"
LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # TensorFlow's: 0 shows everything, 1 hides information
COMPRESSOR = "GRADCOMP_COMPRESSOR"  # the method that replaces the program's own method, as text
MALLOC = "GRADCOMP_MALLOC"  # whether `gradcomp run` tunes its workers' malloc: tuned or default
RESTARTS = "GRADCOMP_RESTARTS"  # `gradcomp run --max-restarts`: how often the job was restarted
HEARTBEAT_TIMEOUT = "GRADCOMP_HEARTBEAT_TIMEOUT"  # seconds, after which a silent worker is lost
STALL_AFTER = "GRADCOMP_STALL_AFTER"  # seconds in a collective, after which a worker reports
START_TIMEOUT = "GRADCOMP_START_TIMEOUT"  # seconds in which all workers must have started


# gRPC reads these names in lower case only, and the first that is set decides.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")


def bypass(hosts: Sequence[str], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variable that makes gRPC connect to workers directly, with its new value.

    Args:
        hosts: The hosts of the workers, by name or IP address.
        env: The environment variables.

    Returns:
        `no_proxy`, or the variable that gRPC prefers if it is set; empty if no worker would be
        connected to through a proxy.
    """
    proxy = proxy_variable(env)
    name = next((name for name in _EXCEPTIONS if name in env), _EXCEPTIONS[-1])
    excepted = [entry.strip() for entry in env.get(name, "").split(",") if entry.strip()]
    endings = tuple(entry.lower() for entry in excepted)
    missing = [host for host in dict.fromkeys(hosts) if not host.lower().endswith(endings)]
    return {name: ",".join([*excepted, *missing])} if proxy and missing else {}


def proxy_variable(env: Mapping[str, str] = os.environ) -> str | None:
    """Returns the name of the variable from which gRPC takes a proxy; None without a proxy."""
    name = next((name for name in _PROXIES if name in env), None)
    return name if name and env[name] else None
