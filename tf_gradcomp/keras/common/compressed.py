"""Base of the `CompressedOptimizer` of both Keras versions: its use of the exchange."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.adam.handover import InnerOptimizer, InnerState
from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.advice import measuring
from tf_gradcomp.advice.probe import choose
from tf_gradcomp.compressors.auto import BASELINE, DEFAULT
from tf_gradcomp.exchange import saving
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.gradients import (
    check_created_in_scope,
    check_variables_in_scope,
    divided,
)
from tf_gradcomp.exchange.setup import Candidate, Method, replacement_of
from tf_gradcomp.groups.current import check_group, group_finder, group_here
from tf_gradcomp.groups.group import Group
from tf_gradcomp.keras.common import equality, saved_state, summing
from tf_gradcomp.keras.common.inner import (
    SAVING,
    TRAINING,
    agree_on_values,
    check_not_by_horovod,
    checked_inner,
    clip,
    facts_of,
    in_loss_scaler,
    is_partly_adam,
    loses_zeros,
    warn_of_lost_zeros,
)
from tf_gradcomp.keras.common.local_optimizer import LocalStepsMixin
from tf_gradcomp.keras.common.second_moments import (
    AUTO,
    check_moments_not_taken,
    check_unchanged,
    inner_state,
    preconditioner_for,
    take_moments,
)
from tf_gradcomp.keras.local.gossip import uses_compressor
from tf_gradcomp.keras.local.local_steps import LocalSteps, Schedule
from tf_gradcomp.keras_version import install_patches, keras, keras_module
from tf_gradcomp.policy import LayerPolicy

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
adam = keras_module("adam")
_OTHER_NAMES = ("_applying_optimizer", "_core", "_target_optimizer")


class Compressed(LocalStepsMixin):
    """The part of an optimizer's wrapper that is equal for both versions of Keras.

    The wrapper derives from this and from its Keras' optimizer. A wrapper calls `_build_exchange`
    and `_take_moments` when its variables are known, and `_reduction_of` in each step.
    """

    name: str
    built: bool
    inner_optimizer: Any
    exchange: GradientExchange
    precondition: str | None

    _base_settings: ClassVar[Mapping[str, Any]] = {}  # of Keras' class of optimizers
    _accepted: ClassVar[type | tuple[type, ...]]

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer | Mapping[str, Any] | str,
        compressor: compressors.Compressor | Mapping[str, Any] | str = DEFAULT,
        policy: LayerPolicy | None = None,
        precondition: str | None = AUTO,
        name: str = "compressed_optimizer",
        *,
        group: str | Group | None = None,
        reduction: str | None = None,
        local_steps: LocalSteps | Mapping[str, Any] | Schedule | None = None,
    ) -> None:
        super().__init__(name=name, **self._base_settings)  # type: ignore[call-arg]
        inner = checked_inner(inner_optimizer, self._accepted, Compressed, self._within)
        install_patches()
        self._find_group = group_finder(group)
        self.reduction = checked_reduction(reduction)
        self.inner_optimizer = inner
        self.precondition = precondition
        self._requested = compressors.get(compressor)
        used = replacement_of(self._requested)
        self._used = self._set_up_local(local_steps, inner, used, self.group, precondition)
        possible = self._prepared_for = self._possible_preconditioner()
        undivided = (bool(possible) and precondition is None) or is_partly_adam(self._core)
        lags = loses_zeros(self._target_optimizer) or (undivided and not self.local_steps)
        methods = compressors.methods_of(self._used, lags=lags)
        if not self.passes_through():
            warn_of_lost_zeros(self._target_optimizer, methods)
        candidates = [self._candidate(method) for method in methods]
        if measuring.is_on():
            candidates = [Candidate(compressors.get(BASELINE))]
        chosen_by = choose if uses_compressor(self.local_steps) else None
        method = Method(repr(self._used), candidates, chosen_by, possible)
        self.exchange = GradientExchange(method, policy, self._find_group)
        self._values_agreed = False
        check_group(self.group)
        self._set_up_keras()

    @abc.abstractmethod
    def _set_up_keras(self) -> None:
        """Sets up the additional parts of one Keras version's wrapper."""

    _deserialized: ClassVar[Callable[..., Any]] = staticmethod(keras.optimizers.deserialize)
    # Yields an optimizer and all optimizers that it wraps.
    _within: ClassVar[Callable[..., Iterable[Any]]] = staticmethod(in_loss_scaler)

    _inside_loss_scaler: bool  # by a loss scaler that wraps this optimizer

    def __dir__(self) -> list[str]:
        """Hides other names of the inner optimizer from Keras, which loads all listed attributes.

        Loading a name that is not in the file does not fail, and makes Keras forget an earlier
        failure.
        """
        return [name for name in super().__dir__() if name not in _OTHER_NAMES]

    @property
    def _core(self) -> Any:
        """The optimizer that updates: the inner optimizer, or the optimizer in its loss scaler."""
        inner = self.inner_optimizer
        scales = isinstance(inner, keras.mixed_precision.LossScaleOptimizer)
        return inner.inner_optimizer if scales else inner

    @property
    def _applying_optimizer(self) -> Any:
        """The inner optimizer, without its loss scaler if this optimizer is in a loss scaler."""
        return self._core if self._inside_loss_scaler else self.inner_optimizer

    @property
    def _target_optimizer(self) -> Any:
        """The optimizer that gets the exchange's results; None if no optimizer does."""
        return self.outer_optimizer if self.local_steps else self._core

    @property
    @abc.abstractmethod
    def trained_variables(self) -> Sequence[Any]:
        """The variables of the model for which the optimizer was built."""

    @property
    @abc.abstractmethod
    def _inner_variables(self) -> Sequence[Any]:
        """All variables of the inner optimizer."""

    def _possible_preconditioner(self) -> Preconditioner | None:
        """Returns the preconditioner that the inner optimizer allows, if any."""
        return adam.possible_preconditioner(self._core)

    def preconditioner_of(self, compressor: compressors.Compressor) -> Preconditioner | None:
        """Returns the preconditioner that this optimizer uses before a compressor, if any."""
        setting = None if self.local_steps else self.precondition
        return preconditioner_for(self._core, compressor, setting)

    def passes_through(self) -> bool:
        """Whether the inner optimizer runs unchanged: only with one replica."""
        return self.group.size == 1

    def inner_state(
        self, variables: Sequence[Any], local_replica: int | None = None
    ) -> InnerState | None:
        """The inner optimizer's state of some variables, by default on the calling replica."""
        group = self.group
        return inner_state(self._core, variables, lambda v: group.local(v, local_replica))

    def _clip(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> Sequence[Gradient]:
        return clip(self._core, grads, variables)

    def _applying(self, variables: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Within this context, the inner optimizer applies the sums for these variables."""
        if not self.exchange.setup.preconditioner:
            return contextlib.nullcontext()
        delayed = self.exchange.divided_gradients(variables)
        divided = [variables[index] for index in delayed]
        return adam.momentum_only(self._core, divided, list(delayed.values()))

    @property
    def compressor(self) -> compressors.Compressor | compressors.Auto:
        """The compression method in use, or the choice of one."""
        return self._used

    @property
    def group(self) -> Group:
        """The replicas that exchange gradients: the strategy's in scope, or Horovod's."""
        return self._find_group()

    def _candidate(self, compressor: compressors.Compressor) -> Candidate:
        return Candidate(compressor, self.preconditioner_of(compressor))

    def _check_scope(self, variables: Sequence[Any], counter: Any) -> None:
        """Refuses to be built for variables, or around an optimizer, of another strategy.

        `counter` is the inner optimizer's count of steps; None if it is created later.
        """
        check_group(self.group)
        if counter is not None and not self.passes_through():
            check_created_in_scope(counter)
        if self.group.size > 1 and tf.distribute.has_strategy():
            check_variables_in_scope(tf.distribute.get_strategy(), variables)

    def _build_exchange(self, variables: Sequence[Any]) -> None:
        for inside in self._within(self.inner_optimizer):
            check_moments_not_taken(inside)
        with tf.init_scope():  # a config reads variables
            check_unchanged(self._prepared_for, self._possible_preconditioner())
            facts = {
                **facts_of("inner optimizer", self.inner_optimizer),
                "precondition": self.precondition,
                "reduction": "mean" if self._takes_means() else "sum",
                **self._local_facts(),
            }
        self.exchange.build(variables, facts)
        self._build_units(self.exchange.group)
        if measuring.is_on():
            measure = self._new_measuring().timing
            self.exchange.take_step = measure(self.exchange.take_step)

    def _take_moments(self) -> None:
        """Marks the inner optimizer's second moments as usable only by this wrapper."""
        if self.exchange.setup.preconditioner:
            for inside in self._within(self.inner_optimizer):
                take_moments(inside)

    def _new_measuring(self) -> measuring.Measuring:
        methods = [*compressors.Auto().candidates, *compressors.methods_of(self._used)]
        methods_by_text = {compressors.text_of(method): method for method in methods}
        candidates = [self._candidate(method) for method in methods_by_text.values()]
        return measuring.Measuring(self.group, self.exchange.specs, candidates)

    def _takes_means(self) -> bool:
        """True if the inner optimizer gets the mean of the replicas' gradients, not the sum."""
        if self.reduction is None:
            return not self.group.by_strategy
        return self.reduction == "mean"

    def _shares(self, grads: Sequence[Gradient]) -> list[Gradient]:
        """Returns the gradients as this replica adds them to the sums."""
        means = self._takes_means()
        summing.warn_if_loss_scaling_wrong(means=means)
        if not means:
            return list(grads)
        return [divided(gradient, self.group.all_replicas.size) for gradient in grads]

    def _reduction_of(self, variables: Sequence[Any]) -> Callable[..., Any]:
        """Returns the function that sums gradients of some variables over the replicas.

        `Group.each_replica` calls the function. The function returns a `StepResult`.
        """
        self._agree_on_values()
        inner = InnerOptimizer(self.inner_state, self._clip)
        return functools.partial(self.exchange.reduce, variables=variables, inner=inner)

    def _agree_on_values(self) -> None:
        """Compares the ranks' models before the first exchange, if no strategy makes them equal."""
        if self._values_agreed or self.group.by_strategy:
            return
        with tf.init_scope():
            values = self.trained_variables, self._inner_variables
            agree_on_values(self.group, *values, TRAINING)
        self._values_agreed = True

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of updates."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate; of a schedule, the current one."""
        rate = self.inner_optimizer.learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return rate(self.iterations)
        return rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Finalizes variables like the inner optimizer, unless that is a legacy optimizer."""
        finalize = getattr(self._core, "finalize_variable_values", None)
        if finalize is not None:
            finalize(var_list)

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Excludes variables from the inner optimizer's weight decay."""
        self._core.exclude_from_weight_decay(*args, **kwargs)

    def collect_state(self) -> None:
        """Sums the workers' own state, so that the chief can save it alone.

        This sums residuals, second moments and accumulated gradients. All workers must call it
        between the same two steps. Until the next step, all saves of the chief, or of rank 0, hold
        the sums: `model.save`, `save_weights`, `tf.train.Checkpoint`. Under a strategy, `fit`
        itself calls this method at the end of each epoch.

        Raises:
            ValueError: If the optimizer is not built.
            WorkersDisagreeError: If the other ranks do something else, have other weights, or have
                another learning rate or other shared state; on this rank, also if the other ranks
                do not call this within an hour, for example because they have more batches.
        """
        if not self.built:
            raise ValueError(
                "collect_state: the optimizer has no state yet; call "
                "optimizer.build(model.trainable_variables) first."
            )
        if not self.group.by_strategy:
            values = self.trained_variables, self._inner_variables
            agree_on_values(self.group, *values, SAVING, saving.COLLECT_SECONDS)
        else:
            equality.compare_optimizer(self)
        self.exchange.saving.collect()

    def _exchange_state(self) -> dict[str, Any]:
        """Returns the variables that are saved in addition to the inner optimizer's, by name."""
        return saved_state.exchange_state(self.exchange) | self._local_state()

    def save_own_variables(self, store: Any) -> None:
        """Saves the exchange's state; Keras saves the inner optimizer next to it.

        Raises:
            ValueError: Under Horovod on other ranks than rank 0, if `collect_state` was not called
                since the last step.
        """
        saved_state.save(self.exchange, self._exchange_state(), store)
        self._save_local(store)

    def load_own_variables(self, store: Any) -> None:
        """Loads the exchange's state, or a checkpoint of the inner optimizer when used unwrapped.

        State that the checkpoint lacks, such as residuals, starts at zero. State that this
        compressor does not keep is not loaded, and the log says so.
        """
        if "0" in store.keys():  # noqa: SIM118 (a store is not always a mapping)
            self.inner_optimizer.load_own_variables(store)
            store = {}
        self._check_local(store)
        saved_state.load(self.exchange, self._exchange_state(), store)

    def get_config(self) -> dict[str, Any]:
        """The config, for `from_config` and Keras' saving."""
        return {
            "name": self.name,
            "inner_optimizer": keras.optimizers.serialize(self.inner_optimizer),
            "compressor": compressors.serialize(self._requested),
            "policy": self.exchange.policy.get_config(),
            "precondition": self.precondition,
            "reduction": self.reduction,
            **self._local_config(),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """The optimizer that `get_config` described.

        The description does not include the group. Gradients are exchanged by the replicas of the
        strategy in scope, or by Horovod's ranks if the program has initialized Horovod for several
        processes.

        Raises:
            ValueError: If `hvd.DistributedOptimizer` is around it.
        """
        check_not_by_horovod(cls)
        inner = cls._deserialized(config["inner_optimizer"], custom_objects=custom_objects)
        make: Any = cls
        return make(
            inner,
            config["compressor"],
            policy=LayerPolicy(**config["policy"]),
            precondition=config["precondition"],
            reduction=config["reduction"],
            name=config["name"],
            group=group_here(),
            local_steps=config.get("local_steps"),
        )


# Python names this function where an argument is unknown, and users know no other class.
Compressed.__init__.__qualname__ = "CompressedOptimizer.__init__"


def checked_reduction(reduction: Any) -> str | None:
    """Returns the given reduction; raises ValueError if it is unknown."""
    if reduction not in (None, "sum", "mean"):
        raise ValueError(
            'CompressedOptimizer: reduction must be "sum", "mean", or None for the sum under a '
            f"strategy and the mean under Horovod; received {reduction!r}."
        )
    return reduction
