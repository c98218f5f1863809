"""The places of variables among all variables of an exchange."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from tf_gradcomp.exchange.gradients import native, path_of
from tf_gradcomp.policy import GradientSpec


class VariableNumbers:
    """Knows the place of each variable among all variables of an exchange.

    Variables are identified by object, and not kept alive: a strategy's exchange ends with its
    variables. `tf.Module` does not track plain objects such as this one, so no checkpoint has them
    twice.
    """

    def __init__(self, variables: Sequence[Any], specs: Sequence[GradientSpec]) -> None:
        self._variables = [weakref.ref(native(variable)) for variable in variables]
        self._numbers = {id(native(variable)): i for i, variable in enumerate(variables)}
        self._specs = specs

    def get(self, variable: Any) -> int | None:
        """Returns the place of a TensorFlow or Keras variable; None if the exchange lacks it."""
        number = self._numbers.get(id(native(variable)))
        # A new variable may have the id of a deleted one.
        if number is None or self._variables[number]() is not native(variable):
            return None
        return number

    def of(self, variables: Sequence[Any]) -> list[int]:
        """Returns the places of variables; raises ValueError for one that the exchange lacks."""
        return [self._of(variable) for variable in variables]

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
