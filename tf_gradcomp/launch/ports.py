"""Free ports of this machine, kept free until the workers take them."""

from __future__ import annotations

import socket
from collections.abc import Sequence


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
