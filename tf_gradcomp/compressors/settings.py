"""Methods with a main setting that may differ by layer kind, by variable and by step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from tf_gradcomp.policy import LAYER_KINDS, GradientSpec

Value = TypeVar("Value")
Setting: TypeAlias = Value | Mapping[str, Value | None] | None


class Valid(NamedTuple):
    """The valid values of a setting."""

    expected: str  # what a valid value is, for messages
    holds: Callable[[Any], bool]  # returns whether a value is valid

    def checked(self, what: str, value: Any) -> Any:
        """Returns a value of `what`, such as `"QSGD: bits"`; raises ValueError if not valid."""
        if not self.holds(value):
            raise ValueError(f"{what} must be {self.expected}; received {value!r}.")
        return value

    def or_none(self) -> Valid:
        """Returns these values and None."""
        return Valid(f"{self.expected}, or None", lambda value: value is None or self.holds(value))


def is_number(value: Any) -> bool:
    """Returns whether `value` is an int or a float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_float32(value: float) -> float:
    """Returns the number as native ops see it: infinite if too large, 0 if too small."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def is_share(value: Any) -> bool:
    """Returns whether `value` is a number above 0 and up to 1."""
    return is_number(value) and 0 < value <= 1


def is_whole_number(value: Any, smallest: int, largest: int) -> bool:
    """Returns whether `value` is an int, not a bool, from `smallest` to `largest`."""
    return isinstance(value, int) and not isinstance(value, bool) and smallest <= value <= largest


def whole_number(smallest: int, largest: int) -> Valid:
    """Returns the whole numbers from `smallest` to `largest`."""
    expected = f"a whole number from {smallest} to {largest}"
    return Valid(expected, lambda value: is_whole_number(value, smallest, largest))


def member_of(*values: int | str) -> Valid:
    """Returns the given values."""
    expected = f"one of {', '.join(map(repr, values))}"
    return Valid(expected, lambda value: type(value) in (int, str) and value in values)


BOOL = Valid("True or False", lambda value: isinstance(value, bool))
SHARE = Valid("a number above 0 and up to 1", is_share)


class PerVariable(Generic[Value]):
    """The values of a setting, such as the size of a bin, for all variables.

    Args:
        what: The method and argument, such as `"AdaComp: bin_sizes"`, for error messages.
        setting: One value for all variables, or by layer kind; kinds not named keep the default.
        defaults: The default values, by layer kind, or one for all kinds.
        overrides: Value by regular expression over variable paths, with precedence over `setting`;
            the first expression that is found anywhere in the path counts.
        valid: The valid values, besides None: the variable is sent whole.
    """

    def __init__(
        self,
        what: str,
        setting: Setting[Value],
        defaults: Setting[Value],
        overrides: Mapping[str, Value | None] | None,
        valid: Valid,
    ) -> None:
        self._what = what
        self._valid = valid
        self.by_kind = _by_kind(defaults)
        if isinstance(setting, Mapping):
            for kind, value in setting.items():
                self._check_kind(kind)
                self._check_value(value, f" of {kind!r}")
            self.by_kind.update(setting)
        else:
            self._check_value(setting, "")
            self.by_kind = _by_kind(setting)
        self.overrides = dict(overrides or {})
        for pattern, value in self.overrides.items():
            self._check_pattern(pattern)
            self._check_value(value, f" of {pattern!r}")

    def of(self, spec: GradientSpec) -> Value | None:
        """The value for one variable; None if it is sent whole."""
        for pattern, value in self.overrides.items():
            if re.search(pattern, spec.path):
                return value
        return self.by_kind[spec.kind]

    def check_choices(self, values: Iterable[Value | None]) -> None:
        """Checks other values for a variable; raises ValueError if a value is not valid."""
        for value in values:
            self._check_value(value, " among the choices")

    def _check_value(self, value: Any, suffix: str) -> None:
        if value is not None and not self._valid.holds(value):
            raise ValueError(
                f"{self._what}{suffix} must be {self._valid.expected}, or None to send variables "
                f"whole; received {value!r}."
            )

    def _check_kind(self, kind: str) -> None:
        if kind not in LAYER_KINDS:
            raise ValueError(
                f"{self._what}: unknown layer kind {kind!r}; expected one of "
                f"{', '.join(LAYER_KINDS)}."
            )

    def _check_pattern(self, pattern: str) -> None:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"{self._what}: {pattern!r} in overrides is not a regular expression: {error}."
            ) from None


def _by_kind(setting: Setting[Value]) -> dict[str, Value | None]:
    """Returns the value of each layer kind."""
    return {**setting} if isinstance(setting, Mapping) else dict.fromkeys(LAYER_KINDS, setting)
