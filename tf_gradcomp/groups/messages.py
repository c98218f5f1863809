"""Messages for the user, by the logger "tf_gradcomp"."""

from __future__ import annotations

import functools
import logging
import os

from tf_gradcomp.chief import is_chief
from tf_gradcomp.environment import LEVEL

_LOGGER = logging.getLogger("tf_gradcomp")


def log_info(message: str) -> None:
    """Logs a message at level INFO of the logger "tf_gradcomp": once, and on the chief only.

    TensorFlow's logger is not used, because by default it shows warnings only. If a program has set
    up logging, its handlers and this logger's level decide which messages are shown.
    """
    if is_chief():
        _log_once(logging.INFO, message)


def log_debug(message: str) -> None:
    """Logs a message like `log_info`, at level DEBUG, which `gradcomp run --verbose` shows."""
    if is_chief():
        _log_once(logging.DEBUG, message)


def log_warning(message: str) -> None:
    """Logs a message at level WARNING of the logger "tf_gradcomp", on the worker that calls."""
    _logger().warning(message)


@functools.cache
def _log_once(level: int, message: str) -> None:
    _logger().log(level, message)


def _logger() -> logging.Logger:
    if _LOGGER.level == logging.NOTSET:
        shows_all = os.environ.get(LEVEL) == "0"
        _LOGGER.setLevel(logging.DEBUG if shows_all else logging.INFO)
    _LOGGER.removeHandler(_library_handler())
    if not _LOGGER.hasHandlers():  # a program may set up logging at any time
        _LOGGER.addHandler(_library_handler())
    return _LOGGER


@functools.cache
def _library_handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("tf_gradcomp: %(message)s"))
    return handler


def forget() -> None:
    """Forgets which messages were logged, as in a new program."""
    _log_once.cache_clear()
