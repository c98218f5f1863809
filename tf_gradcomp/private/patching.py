"""Replaces functions of TensorFlow and Keras, and methods of single objects.

A replacement is essential, or it is a guard. Without a guard, jobs train as with Keras alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar


class Patch(NamedTuple):
    """A function of TensorFlow or Keras that this package replaces while a program runs."""

    target: str  # the dotted name of the function
    by: Callable[..., Any]  # the replacement; called with the original before all arguments
    why: str  # the fault, or the missing feature, that makes the patch necessary
    test: str  # the test that fails if the patch no longer works
    upstream: str | None  # the upstream issue, if there is one
    essential: bool  # whether jobs would be wrong without it


PATCHES: list[Patch] = []
_Function = TypeVar("_Function", bound=Callable[..., Any])


class ChangedFunctionError(TypeError):
    """A function of TensorFlow or Keras takes other arguments than its replacement."""


class UntestedVersionError(ImportError):
    """A release of Keras or TensorFlow lacks a function that training needs."""


def patch(
    target: str, *, why: str, test: str, upstream: str | None = None, essential: bool = False
) -> Callable[[_Function], _Function]:
    """Registers the decorated function as the replacement of another one.

    The replacement gets the original function first, and then the arguments of the original. Its
    parameters must be those of the original, or end with `*args` and `**kwargs`. AutoGraph may
    convert it if it is called in a traced step.

    Args:
        target: The dotted name of the function to replace.
        why: The fault, or the missing feature, that makes this necessary.
        test: The name of the test that fails if the patch no longer works.
        upstream: The upstream issue, if there is one.
        essential: Whether jobs would be wrong without it.
    """

    def register(by: _Function) -> _Function:
        PATCHES.append(Patch(target, by, why, test, upstream, essential))
        return by

    return register


def apply(
    patches: Sequence[Patch], versions: str, remedy: str, warn: Callable[[str], None]
) -> None:
    """Applies patches; skips and logs a guard whose function is missing or has changed.

    Args:
        patches: The patches, in order.
        versions: The versions in use, for messages.
        remedy: What to install, for messages.
        warn: Warns the user.

    Raises:
        UntestedVersionError: If the patch is essential.
    """
    for patch in patches:
        try:
            _replace(patch)
        except (AttributeError, ImportError, ChangedFunctionError) as error:
            if patch.essential:
                raise UntestedVersionError(
                    f"tf_gradcomp cannot train with {versions}: {patch.target} is missing or has "
                    f"changed ({error}). {remedy}"
                ) from error
            warn(
                f"With {versions}, {patch.target} is missing or has changed ({error}), so this "
                f"protection is off: {patch.why} {remedy}"
            )


def _replace(patch: Patch) -> None:
    owner_name, _, name = patch.target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, name)
    check_replacement(original, patch.by)
    if inspect.isclass(owner):
        setattr(owner, name, _Method(patch.by, original))
        return

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return patch.by(original, *args, **kwargs)

    setattr(owner, name, replacement)


def check_replacement(original: Callable[..., Any], by: Callable[..., Any]) -> None:
    """Checks that a function can take the place of another one, which it gets as first argument.

    Raises:
        ChangedFunctionError: If the parameters differ.
    """
    theirs = list(inspect.signature(original).parameters)
    _, *ours = inspect.signature(by).parameters.values()
    named = [
        parameter.name for parameter in ours if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if theirs[: len(named)] != named or (len(named) == len(ours) and len(theirs) != len(named)):
        raise ChangedFunctionError(f"its parameters are {', '.join(theirs)}")


class _Method:
    """A method that calls its replacement, without a frame in between."""

    def __init__(self, by: Callable[..., Any], original: Callable[..., Any]) -> None:
        self._by, self._original = by, original

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        bound = () if instance is None else (instance,)
        call: Any = functools.partial(self._by, self._original, *bound)
        call.__wrapped__ = self._original  # has the signature
        return call


@contextlib.contextmanager
def with_methods(thing: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Within this context, an object has other methods, which take no `self`.

    They are attributes of the object. Keras' own way to set attributes would track them.
    """
    attributes = vars(thing)
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del attributes[name]
        attributes.update(before)
