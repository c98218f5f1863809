"""Creates variables outside a strategy's scope, and reads a process's own parts of variables."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeVar

_owners: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar("owners", default=())


@contextlib.contextmanager
def reading_own(*owners: object) -> Iterator[None]:
    """Has some owners of variables read only this process's parts, within this context."""
    token = _owners.set((*_owners.get(), *owners))
    try:
        yield
    finally:
        _owners.reset(token)


def reads_own(owner: object) -> bool:
    """Returns whether an owner of variables reads only this process's parts."""
    return any(one is owner for one in _owners.get())


Result = TypeVar("Result")


def out_of_scope(make: Callable[[], Result]) -> Result:
    """Calls `make` outside the current strategy's scope and returns its result.

    Within the scope, TensorFlow replicates each variable, which synchronizes the workers. A scope
    belongs to one thread, so a new thread is outside every scope.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
