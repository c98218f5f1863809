"""Methods whose setting of each variable can be planned, as `LGreCo` does."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tf_gradcomp.compressors.base import Compressor, StateSpec
from tf_gradcomp.policy import VECTOR, GradientSpec

LEAST_ELEMENTS = 1024  # in a planned variable, as in CGX
_RANGE, _STEPS = 10, 5  # geometric, from a tenth to ten times: 5 steps down and 5 up

Cost: TypeAlias = tuple[float, float]  # bytes and error


class Plannable(Compressor):
    """A method that can predict the bytes and the error of each setting of a variable."""

    @abc.abstractmethod
    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        """Returns the main setting of each variable; see `Compressor.settings`."""

    @abc.abstractmethod
    def choices(self, spec: GradientSpec, values: Sequence[Any] | None = None) -> list[int] | None:
        """Returns the settings that a plan may give a variable.

        Args:
            spec: What is known of the variable's gradient.
            values: Values of the main setting, as the constructor takes them. By default, a range
                around the method's own value.

        Returns:
            Numbers as `settings` has them, without duplicates. None if the variable keeps its own
            setting because it is small, a vector or sent whole.

        Raises:
            ValueError: If one of the values is not valid.
        """

    @abc.abstractmethod
    def costs(
        self, spec: GradientSpec, values: np.ndarray, settings: Sequence[int], replicas: int
    ) -> list[Cost]:
        """Returns the cost of each setting, after one pass over the values if possible.

        Args:
            spec: What is known of the variable's gradient.
            values: The gradient: float32, finite, of magnitudes up to 1.
            settings: Numbers as `settings` has them.
            replicas: The number of replicas. If a replica leads, bytes are the mean over all
                replicas.

        Returns:
            For each setting the bytes of the payload, as `Reduced.tensor_bytes` counts them, and
            the L2 norm of the values minus their sent part, starting from a residual of zeros.
        """

    def state_for(self, spec: GradientSpec, settings: Sequence[int]) -> dict[str, StateSpec]:
        """Returns the variables that steps with any of these settings need.

        Args:
            spec: The spec of the gradient.
            settings: Numbers as `settings` has them.
        """
        return self.state(spec)


def is_planned(spec: GradientSpec) -> bool:
    """Returns whether the variable is large enough for its own plan, and not a vector."""
    return spec.kind != VECTOR and spec.elements >= LEAST_ELEMENTS


def geometric(setting: int, most: int) -> list[int]:
    """Returns whole numbers from a tenth of a setting to ten times it, from 1 to `most`."""
    scales = [_RANGE ** (step / _STEPS) for step in range(-_STEPS, _STEPS + 1)]
    return distinct(min(max(1, round(setting * scale)), most) for scale in scales)


def distinct(settings: Iterable[int]) -> list[int]:
    """Returns the settings without duplicates, in the order of their first occurrences."""
    return list(dict.fromkeys(settings))


def whole(spec: GradientSpec) -> Cost:
    """Returns the cost of a variable that is sent uncompressed."""
    return 4.0 * spec.elements, 0.0


def sum_of_squares(values: np.ndarray) -> float:
    """Returns the sum of squares in float64."""
    return float(np.sum(np.square(values, dtype=np.float64)))
