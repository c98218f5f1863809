"""The part of an optimizer's wrapper that local steps need."""

from __future__ import annotations

import abc
import zlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.advice import measuring
from tf_gradcomp.chief import is_chief
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.gradients import native
from tf_gradcomp.exchange.state import shared_variable
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras.common import equality, saved_state
from tf_gradcomp.keras.local.gossip import Gossip, method_for_gradients, settings_of
from tf_gradcomp.keras.local.local_steps import check_can_be_local, check_method
from tf_gradcomp.keras.local.rounds import ResidualUnits, Rounds
from tf_gradcomp.keras_version import keras
from tf_gradcomp.private import tensorflow as tf_private

_LOG = tf.get_logger()
_DROPPED = (
    "The checkpoint holds the state of an outer optimizer of local steps, and this job has no "
    "outer optimizer. The state is not loaded: a later job that resumes from this job begins with "
    "a new outer optimizer. To keep the state, continue with the outer optimizer that wrote the "
    "checkpoint."
)


class OuterOptimizerClass(tf.Module):
    """Records the class of the outer optimizer, and refuses the state of another class.

    Keras restores an optimizer's variables by their order, so another optimizer would take momentum
    for squares of gradients, for example.

    Attributes:
        number: Identifies the class; 0 without an outer optimizer.

    Args:
        group: The replicas.
        outer: The outer optimizer, if any.
    """

    def __init__(self, group: Group, outer: Any) -> None:
        super().__init__(name="outer_kind")
        self._class = type(outer).__name__
        self.number = 0 if outer is None else zlib.crc32(self._class.encode())
        self._saved = group.create(
            lambda: shared_variable(self.number, tf.int64, saved_state.OUTER_CLASS)
        )
        class_hash = tf.constant(self.number, tf.int64)
        tf_private.save_as(native(self._saved), lambda: class_hash, self.check)

    def check(self, saved: Any) -> None:
        """Raises if the checkpoint was saved with another class of outer optimizer.

        A job without an outer optimizer refuses nothing, and tells of state that it drops.

        Raises:
            ValueError: With the way out.
        """
        saved_kind = int(np.asarray(saved))
        if saved_kind and not self.number and is_chief():
            _LOG.warning(_DROPPED)
        if saved_kind and self.number and saved_kind != self.number:
            raise ValueError(
                "The checkpoint holds the state of an outer optimizer of another class than "
                f"{self._class}, which cannot use it. Continue with the outer optimizer that wrote "
                "the checkpoint, or restore only the model's weights."
            )


class LocalStepsMixin:
    """Keeps the settings of local steps, and the rounds once the exchange is built.

    Attributes:
        local_steps: The settings of local steps, if workers take them.
        outer_optimizer: The optimizer that updates the common weights after a round; None if the
            common weights become the mean of the workers' weights.
        rounds: The rounds of local steps; None without them, and until the exchange is built.
    """

    exchange: GradientExchange

    def _set_up_local(
        self,
        local_steps: Any,
        inner: Any,
        used: compressors.Compressor | compressors.Auto,
        group: Group,
        precondition: str | None,
    ) -> compressors.Compressor | compressors.Auto:
        """Returns the method that exchanges gradients, or differences of weights."""
        # Measuring mode measures a synchronous step.
        self.local_steps = None if measuring.is_on() else settings_of(local_steps)
        self.outer_optimizer = self.local_steps.outer if self.local_steps else None
        self.rounds: Rounds | None = None
        used = method_for_gradients(self.local_steps, used)
        if self.local_steps:
            check_can_be_local(inner, group, precondition)
            if isinstance(self.local_steps, Gossip) and group.size > 1:
                self.local_steps.share(group.size)  # raises ValueError for an impossible graph
            for method in compressors.methods_of(used):
                check_method(method)
        return used

    def _local_facts(self) -> dict[str, Any]:
        """Returns the settings that must be equal on all workers, by name."""
        return self.local_steps.facts() if self.local_steps else {"local_steps": None}

    def _build_units(self, group: Group) -> None:
        with tf.init_scope():
            self._residual_units = ResidualUnits(group, local=self.local_steps is not None)
            self._outer_class = OuterOptimizerClass(group, self.outer_optimizer)

    def _local_state(self) -> dict[str, Any]:
        """Returns the variables that Keras' files hold, by name."""
        if self.rounds is None:
            return {}
        units = self._residual_units
        steps = {saved_state.STEPS: units.steps}
        if isinstance(self.local_steps, Gossip):  # gossip has no residual of weights
            return steps
        return {saved_state.IN_WEIGHT_UNITS: units.in_weight_units, **steps}

    def _save_local(self, store: Any) -> None:
        """Gives a file of Keras the class of the outer optimizer."""
        if self.rounds is not None:
            store[saved_state.OUTER_CLASS] = np.int64(self._outer_class.number)

    def _check_local(self, store: Any) -> None:
        """Refuses a file of Keras with the state of another outer optimizer."""
        if self.exchange.built and saved_state.OUTER_CLASS in store:
            self._outer_class.check(store[saved_state.OUTER_CLASS])

    def _local_config(self) -> dict[str, Any]:
        return {"local_steps": self.local_steps.get_config()} if self.local_steps else {}

    def synchronize(self, model: keras.Model | None = None) -> None:
        """Ends a round of local steps now, so that all workers have the same weights.

        In your own training loop, all workers must call this between the same two steps, before
        they evaluate, save or read the weights. `fit` calls this method itself. Without
        `local_steps`, this method does nothing.

        Args:
            model: If given, variables that the optimizer does not train become equal, too: floats,
                such as the statistics of `BatchNormalization` or the weights of a teacher, become
                their means over the workers, and whole numbers the chief's.

        Raises:
            WorkersDisagreeError: If the other workers do something else, are at another step, or
                have other weights or settings afterwards.
        """
        if self.rounds is not None:
            if model is not None:
                self.rounds.add_model(model)
            self.rounds.finish()

    @property
    @abc.abstractmethod
    def trained_variables(self) -> Sequence[Any]:
        """The variables of the model for which the optimizer was built."""

    def reconcile(self, model: keras.Model) -> None:
        """Gives a model equal variables on all workers, between two steps."""
        outer = self.outer_optimizer
        equal = [*self.trained_variables, *(outer.variables if outer else [])]
        group = cast(StrategyGroup, self.exchange.group.all_replicas)
        equality.reconcile(group, equal, [self], model)
