"""Compressors by name: how to name, save and load them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from tf_gradcomp.near_names import near
from tf_gradcomp.policy import LAYER_KINDS


class Named(Protocol):
    """A compressor, or a choice between compressors."""

    name: ClassVar[str]

    def get_config(self) -> dict[str, Any]:
        """The settings, JSON-serializable, as the constructor takes them."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Creates the object that `get_config` described."""


_classes: dict[str, type[Any]] = {}


def register(class_: type[Any]) -> type[Any]:
    """Registers a class by its name; every subclass of `Compressor` with a name is registered."""
    name = class_.name.lower()
    known = _classes.get(name)
    if known is not None and known.__qualname__ != class_.__qualname__:
        raise ValueError(
            f"compressor: the name {class_.name!r} of {class_.__qualname__} is already taken by "
            f"{known.__qualname__}; choose another name."
        )
    _classes[name] = class_
    return class_


def get(identifier: str | Mapping[str, Any] | Named) -> Any:
    """The compressor that `identifier` describes.

    Args:
        identifier: A name such as `"adacomp"` (default settings), a name with settings such as
            `"adacomp(bin_sizes=100)"`, the result of `serialize`, or a compressor, which is
            returned unchanged.

    Raises:
        ValueError: If no compressor has this name or takes these settings.
        TypeError: If `identifier` is of another type.
    """
    if isinstance(identifier, str):
        return _from_text(identifier)
    if isinstance(identifier, Mapping):
        return deserialize(identifier)
    if isinstance(identifier, tuple(_classes.values())):
        return identifier
    raise TypeError(
        f"compressor: expected a name ({', '.join(_classes)}), a config or a compressor such as "
        f"gc.compressors.AdaComp(); received {identifier!r}."
    )


def names() -> list[str]:
    """The names that `get` knows."""
    return list(_classes)


def serialize(compressor: Named) -> dict[str, Any]:
    """A JSON-serializable description, for `deserialize`."""
    return {"name": compressor.name, "config": compressor.get_config()}


def text_of(compressor: Named) -> str:
    """The shortest text from which `get` returns this compressor."""
    try:
        defaults = type(compressor)().get_config()
    except TypeError:  # some of its settings have no default
        defaults = {}
    settings = ", ".join(
        f"{name}={_shortest(value)!r}"
        for name, value in compressor.get_config().items()
        if name not in defaults or value != defaults[name]
    )
    return f"{compressor.name}({settings})" if settings else compressor.name


def _shortest(setting: Any) -> Any:
    """A number in place of a setting by layer kind that is this number for all kinds."""
    if isinstance(setting, dict) and setting.keys() == set(LAYER_KINDS):
        first, *others = setting.values()
        if isinstance(first, int | float) and all(value == first for value in others):
            return first
    return setting


def deserialize(description: Mapping[str, Any]) -> Any:
    """The compressor that `serialize` described.

    Raises:
        ValueError: If the description is malformed, or names no compressor.
    """
    if set(description) != {"name", "config"}:
        raise ValueError(
            "compressor: expected a config with the keys 'name' and 'config', as "
            f"gc.compressors.serialize returns; received {dict(description)!r}."
        )
    return class_named(description["name"]).from_config(description["config"])


def _from_text(text: str) -> Any:
    name, bracket, _ = text.partition("(")
    method = class_named(name.strip())
    if not bracket:
        return method()
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise SyntaxError("one pair of brackets holds all settings")
        if call.args:
            raise SyntaxError("settings have names")
        settings = _settings(call.keywords)
        _check_known(method, settings)
        return method(**settings)
    except (SyntaxError, TypeError) as error:
        raise ValueError(
            f"compressor: cannot read {text!r} ({_reason(error)}); expected a name, or one with "
            f"settings such as {method.name}(warmup_steps=100)."
        ) from None


def _reason(error: Exception) -> str:
    """The message of an error, without the line of a file that there is not."""
    return str(error.msg if isinstance(error, SyntaxError) else error)


def _check_known(method: type[Any], settings: Mapping[str, Any]) -> None:
    known = _known_settings(method)
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ValueError(
            f"compressor: {method.name!r} has no setting {unknown[0]!r}; "
            f"{_expected(unknown[0], known)} {', '.join(known) or 'none at all'}."
        )


def _known_settings(method: type[Any]) -> list[str]:
    """The names of a constructor's arguments, including arguments of its base classes."""
    known: list[str] = []
    for class_ in method.__mro__:
        if "__init__" in vars(class_):
            _, *arguments = inspect.signature(vars(class_)["__init__"]).parameters.values()
            known += [
                argument.name for argument in arguments if argument.kind is not argument.VAR_KEYWORD
            ]
            if not any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
                break
    return known


def _expected(name: str, known: Sequence[str]) -> str:
    """The word "expected", after a question about similar known names."""
    found = near(name, known)
    return f"did you mean {' or '.join(map(repr, found))}? Expected" if found else "expected"


def _settings(keywords: Sequence[ast.keyword]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for setting in keywords:
        if setting.arg in settings:
            raise SyntaxError(f"{setting.arg} is given twice")
        try:
            settings[str(setting.arg)] = ast.literal_eval(setting.value)
        except ValueError:
            raise SyntaxError(f"{ast.unparse(setting.value)} is not a plain value") from None
    return settings


def class_named(name: str) -> type[Any]:
    """Returns the class of this name; raises ValueError if there is none."""
    try:
        return _classes[name.lower()]
    except KeyError:
        raise ValueError(
            f"compressor: unknown name {name!r}; "
            f"{_expected(name, list(_classes))} one of {', '.join(_classes)}."
        ) from None
