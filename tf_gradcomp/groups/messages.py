"""Messages for the user, by the logger "tf_gradcomp"."""

from __future__ import annotations

import functools
import logging

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
