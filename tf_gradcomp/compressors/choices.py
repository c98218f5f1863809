"""Which other settings a plan may give a variable."""

from __future__ import annotations

from collections.abc import Iterable

from tf_gradcomp.policy import VECTOR, GradientSpec

LEAST_ELEMENTS = 1024  # of a variable that is planned, as in CGX
_RANGE, _STEPS = 10, 5  # geometric: from a tenth to ten times, with 5 steps down and 5 up


def is_planned(spec: GradientSpec) -> bool:
    """Whether the variable is large enough for a plan of its own, and no vector."""
    return spec.kind != VECTOR and spec.elements >= LEAST_ELEMENTS


def geometric(setting: int, most: int) -> list[int]:
    """Whole numbers from a tenth of a setting to ten times it, from 1 to `most`."""
    scales = [_RANGE ** (step / _STEPS) for step in range(-_STEPS, _STEPS + 1)]
    return distinct(min(max(1, round(setting * scale)), most) for scale in scales)


def distinct(settings: Iterable[int]) -> list[int]:
    """Each setting once, where it comes first."""
    return list(dict.fromkeys(settings))
