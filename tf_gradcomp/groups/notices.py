"""Messages for the user, and variables outside a strategy's scope."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from tf_gradcomp.chief import is_chief

_LOGGER = logging.getLogger("tf_gradcomp")


def tell_user(message: str) -> None:
    """Logs a message at level INFO of the logger "tf_gradcomp": once, and on the chief only.

    TensorFlow's logger is not used, because by default it shows warnings only. If a program has set
    up logging, its handlers and this logger's level decide which messages are shown.
    """
    if is_chief():
        _tell_once(message)


def warn_user(message: str) -> None:
    """Logs a message at level WARNING of the logger "tf_gradcomp", on the worker that calls."""
    _logger().warning(message)


@functools.cache
def _tell_once(message: str) -> None:
    _logger().info(message)


def _logger() -> logging.Logger:
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(logging.INFO)
    _LOGGER.removeHandler(_own_handler())
    if not _LOGGER.hasHandlers():  # a program may set up logging at any time
        _LOGGER.addHandler(_own_handler())
    return _LOGGER


@functools.cache
def _own_handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("tf_gradcomp: %(message)s"))
    return handler


def forget() -> None:
    """Forgets which messages were logged, as in a new program."""
    _tell_once.cache_clear()


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
