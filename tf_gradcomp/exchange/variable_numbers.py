"""The places of variables among all variables of an exchange."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from tf_gradcomp.exchange.gradients import check_dtypes, native, path_of
from tf_gradcomp.policy import GradientSpec


class VariableNumbers:
    """Knows the place of each variable among all variables of an exchange.

    Variables are identified by object, and not kept alive: a strategy's exchange ends with its
    variables. `tf.Module` does not track plain objects such as this one, so no checkpoint has them
    twice.

    Args:
        variables: All variables of the exchange.
        specs: The specs of their gradients.
        exchanged: Whether there are several replicas, which exchange gradients of few dtypes.
    """

    def __init__(
        self, variables: Sequence[Any], specs: Sequence[GradientSpec], *, exchanged: bool
    ) -> None:
        self._variables = [weakref.ref(native(variable)) for variable in variables]
        self._numbers = {id(native(variable)): i for i, variable in enumerate(variables)}
        self._specs = specs
        self._exchanged = exchanged

    def get(self, variable: Any) -> int | None:
        """Returns the place of a TensorFlow or Keras variable; None if the exchange lacks it."""
        number = self._numbers.get(id(native(variable)))
        # A new variable may have the id of a deleted one.
        if number is None or self._variables[number]() is not native(variable):
            return None
        return number

    def include(self, variables: Sequence[Any]) -> bool:
        """Returns whether the exchange was built for all of `variables`."""
        return all(self.get(variable) is not None for variable in variables)

    def of(self, variables: Sequence[Any]) -> list[int]:
        """Returns the places of variables; raises ValueError for one that the exchange lacks."""
        return [self._of(variable) for variable in variables]

    def check(self, variables: Sequence[Any]) -> list[int]:
        """Returns the places of variables that have gradients.

        Raises:
            ValueError: If the exchange lacks a variable, or does not exchange gradients of its
                dtype.
        """
        numbers = self.of(variables)
        if self._exchanged:
            check_dtypes([self._specs[number] for number in numbers])
        return numbers

    def _of(self, variable: Any) -> int:
        number = self.get(variable)
        if number is None:
            known = ", ".join(spec.path for spec in self._specs) or "none"
            raise ValueError(
                f"Variable {path_of(variable)!r} is not among the variables whose gradients are "
                f"exchanged: {known}. If layers were unfrozen since, or for another model, compile "
                "with a new CompressedOptimizer; otherwise build the optimizer with all variables "
                "that it will receive."
            )
        return number
