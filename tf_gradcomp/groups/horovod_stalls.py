"""Reports which ranks a Horovod job waits for, because Horovod's own stall check often does not."""

from __future__ import annotations

import functools
import http.client
import os
from typing import Any

from tf_gradcomp.groups.progress import Progress
from tf_gradcomp.groups.stalls import PositionStore, Watchdog
from tf_gradcomp.groups.waiting_times import stall_after

_ADDRESS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_REQUEST = 2.0  # seconds


class LauncherStore(PositionStore):
    """The key-value store of Horovod's launcher, through which gloo connects the ranks."""

    def __init__(self, host: str, port: int) -> None:
        self._server = host, port

    def write(self, key: str, text: str, *, first: bool) -> None:
        self._request("PUT", key, text.encode(), _REQUEST)

    def text(self, key: str, seconds: float) -> str | None:
        try:
            return self._request("GET", key, None, max(seconds, _REQUEST))
        except TimeoutError:
            return None

    def _request(self, method: str, key: str, body: bytes | None, seconds: float) -> str | None:
        connection = http.client.HTTPConnection(*self._server, timeout=seconds)
        try:
            connection.request(method, f"/gradcomp/{key.replace('/', '-')}", body)
            answer = connection.getresponse()
            return answer.read().decode() if answer.status == http.client.OK else None
        except (OSError, http.client.HTTPException) as error:
            raise TimeoutError from error
        finally:
            connection.close()


@functools.cache
def watched_progress(hvd: Any) -> Progress | None:
    """Starts a watchdog, and returns the progress of this rank; None if ranks do not report.

    Ranks started by MPI do not report, because `mpirun` offers no key-value store.
    """
    seconds = stall_after(None)
    if seconds == 0 or hvd.size() == 1 or not all(name in os.environ for name in _ADDRESS):
        return None
    host, port = (os.environ[name] for name in _ADDRESS)
    names = [f"Rank {rank}" for rank in range(hvd.size())]
    progress = Progress()
    Watchdog(progress, hvd.rank(), names, seconds, LauncherStore(host, int(port))).start()
    return progress
