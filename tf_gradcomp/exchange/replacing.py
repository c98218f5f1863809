"""Replaces a program's compression method by the method in `GRADCOMP_COMPRESSOR`."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Mapping
from typing import Any

from tf_gradcomp.compressors import registry
from tf_gradcomp.environment import COMPRESSOR
from tf_gradcomp.groups.notices import tell_user

_used: set[str] = set()  # texts of the variable that have replaced a method


def replacement_of(given: Any) -> Any:
    """Returns the method that the variable names; without the variable, `given`."""
    text = os.environ.get(COMPRESSOR)
    if not text:
        return given
    try:
        method = registry.get(text)
    except ValueError as error:
        raise ValueError(f"{COMPRESSOR}={text!r}: {error}") from error
    _used.add(text)
    tell_user(
        f"{COMPRESSOR}: gradients are exchanged by {registry.text_of(method)!r}, in place of the "
        f"program's own {registry.text_of(given)!r}."
    )
    return method


def fact() -> Mapping[str, str | None]:
    """Returns the facts that must be equal on all workers."""
    return {COMPRESSOR: os.environ.get(COMPRESSOR)}


def report_no_effect() -> None:
    """Tells the user, if the variable is set, that the program has no method to replace."""
    text = os.environ.get(COMPRESSOR)
    if text:
        tell_user(
            f"{COMPRESSOR}={text} has no effect: it replaces the compressor of a "
            "gc.CompressedOptimizer or of gc.MultiWorkerMirroredStrategy(compressor=...), and "
            "this program has neither."
        )


@atexit.register
def _report_at_exit() -> None:
    if os.environ.get(COMPRESSOR) not in _used:
        with contextlib.suppress(ValueError):  # Horovod may be shut down
            report_no_effect()
