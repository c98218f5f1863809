"""Creation of variables under a strategy: workers check that they create the same variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tf_gradcomp.exchange.gradients import check_variables_in_scope
from tf_gradcomp.groups import bitcast
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.private import tensorflow as tf_private


class CheckedVariables:
    """Checks that all workers of a strategy create the same variables in the same order."""

    def __init__(self, group: StrategyGroup) -> None:
        self._group = group
        self._checking = self._agreed = False
        self._shared: Any = None  # the newest initial value, if all workers have the same
        strategy = group.strategy
        tf_private.broadcast_no_empty_variables(strategy)
        tf_private.on_initial_values(strategy, self._chief_value)
        self._colocate = strategy.extended.colocate_vars_with
        strategy.extended.colocate_vars_with = self._colocate_checked

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Within this context, all workers must create the same variables in the same order."""
        if self._checking:
            yield
            return
        self._checking = True
        try:
            with tf.variable_creator_scope(self._create_checked):
                yield
        finally:
            self._checking = False

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Within this context, variables are not compared: workers have already agreed on them."""
        before, self._agreed = self._agreed, True
        try:
            yield
        finally:
            self._agreed = before

    def _create_checked(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if self._agreed:
            return next_creator(**kwargs)
        initial_value = kwargs.get("initial_value")
        if isinstance(initial_value, tf.__internal__.tracking.CheckpointInitialValueCallable):
            return next_creator(**kwargs)

        def checked() -> tf.Tensor:
            value = initial_value() if callable(initial_value) else initial_value
            value = tf.convert_to_tensor(value, kwargs.get("dtype"))
            variable = f"{kwargs.get('name')} {value.shape} {value.dtype.name}"
            known = value if hasattr(value, "numpy") and value.dtype != tf.string else None
            with tf.init_scope():  # legacy optimizers create some while a step is traced
                self._compare({"next action": f"creating variable {variable}"}, known)
            return value

        # TensorFlow moves an initial value out of a function if it depends on no argument of that.
        with tf.control_dependencies(None):
            return next_creator(**{**kwargs, "initial_value": checked})

    def _compare(self, facts: Mapping[str, Any], value: Any) -> None:
        """Compares facts, and in the same collective the initial value if it is known."""
        if value is None:
            self._group.processes.agree(facts)
        elif self._group.processes.agree_and_share(facts, value.numpy()):
            self._shared = value

    def _colocate_checked(self, variable: Any) -> Any:
        """Creates a slot of an optimizer as TensorFlow does, with a helpful error."""
        if isinstance(variable, tf.Variable):
            check_variables_in_scope(self._group.strategy, [variable])
        return self._colocate(variable)

    def _chief_value(
        self, value: tf.Tensor, broadcast: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """Returns the chief's initial value of a variable of any dtype."""
        if value is self._shared:
            self._shared = None
            return value
        if value.dtype != tf.string:
            return bitcast.decoded(broadcast(bitcast.encoded(value)), value.dtype)
        known = tf.get_static_value(value)
        if known is None:
            raise ValueError(
                "A string variable was created in a tf.function with an initial value that the "
                "function computes; create the variable before you call the function."
            )
        with tf.init_scope():
            chief_bytes = self._group.processes.broadcast_bytes(bitcast.as_bytes(known))
            return bitcast.as_strings(chief_bytes, value.shape)


class CheckedScope:
    """A strategy scope in which the creation of variables is checked."""

    def __init__(self, scope: Any, variables: CheckedVariables) -> None:
        self._scope = scope
        self._variables = variables
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> tf.distribute.Strategy:
        with contextlib.ExitStack() as stack:
            strategy = stack.enter_context(self._scope)
            stack.enter_context(self._variables.checked())
            self._stack = stack.pop_all()
        return strategy

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)
