"""Reports which ranks a job of Horovod waits for: Horovod's own stall check often says nothing."""

from __future__ import annotations

import functools
import http.client
import os
from typing import Any

from tf_gradcomp.groups.progress import Progress
from tf_gradcomp.groups.stalls import Board, Watchdog
from tf_gradcomp.groups.waiting_times import stall_after

_ADDRESS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_TELL = 2.0  # seconds


class LaunchersBoard(Board):
    """The key-value store of Horovod's launcher, by which gloo connects the ranks."""

    keeper = None

    def __init__(self, host: str, port: int) -> None:
        self._server = host, port

    def write(self, key: str, text: str, *, first: bool) -> None:
        self._ask("PUT", key, text.encode(), _TELL)

    def text(self, key: str, seconds: float) -> str | None:
        try:
            return self._ask("GET", key, None, max(seconds, _TELL))
        except TimeoutError:
            return None

    def _ask(self, method: str, key: str, body: bytes | None, seconds: float) -> str | None:
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
    """Returns the progress of this rank, which is watched; None if ranks do not report.

    MPI has no such store.
    """
    seconds = stall_after(None)
    if seconds == 0 or hvd.size() == 1 or not all(name in os.environ for name in _ADDRESS):
        return None
    host, port = (os.environ[name] for name in _ADDRESS)
    names = [f"Rank {rank}" for rank in range(hvd.size())]
    progress = Progress()
    Watchdog(progress, hvd.rank(), names, seconds, LaunchersBoard(host, int(port))).start()
    return progress
