"""Finds workers that gRPC would connect to through an HTTP proxy, which usually cannot reach them.

This module imports only the standard library, so that the launcher starts without TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

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
