"""Checks that a function of Keras or TensorFlow can still be replaced as in the tested releases."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


class ChangedFunctionError(TypeError):
    """A function of TensorFlow or Keras takes other arguments than its replacement."""


def in_place_of(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function that is to replace `original`, and checks that it can.

    Raises:
        ChangedFunctionError: If the parameters differ.
    """

    def decorate(by: Callable[..., Any]) -> Any:
        check_replacement(original, by)
        return functools.wraps(original)(by)

    return decorate


def check_replacement(original: Callable[..., Any], by: Callable[..., Any], more: int = 0) -> None:
    """Checks that a function can take the place of another one.

    Args:
        original: The function to be replaced.
        by: Its replacement, not yet marked as a wrapper of `original`.
        more: The number of arguments that the replacement takes before those of `original`.

    Raises:
        ChangedFunctionError: If the parameters differ.
    """
    theirs = list(inspect.signature(original).parameters)
    ours = list(inspect.signature(by).parameters.values())[more:]
    named = [one.name for one in ours if one.kind is one.POSITIONAL_OR_KEYWORD]
    if theirs[: len(named)] != named or (len(named) == len(ours) and len(theirs) != len(named)):
        raise ChangedFunctionError(f"its parameters are {', '.join(theirs)}")
