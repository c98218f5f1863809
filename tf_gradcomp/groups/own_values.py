"""Reads of per-replica variables that are not summed over the processes of a job."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_owners: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar("owners", default=())


@contextlib.contextmanager
def reading_own(*owners: object) -> Iterator[None]:
    """Within this context, some owners of variables read the parts of this process alone."""
    token = _owners.set((*_owners.get(), *owners))
    try:
        yield
    finally:
        _owners.reset(token)


def reads_own(owner: object) -> bool:
    """Returns whether an owner of variables is to read the parts of this process alone."""
    return any(one is owner for one in _owners.get())
