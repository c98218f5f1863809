"""Base of the `CompressedOptimizer` of both Keras versions: its use of the exchange."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.adam.handover import InnerOptimizer, InnerState
from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.advice import measuring
from tf_gradcomp.advice.choice import choose
from tf_gradcomp.compressors.auto import BASELINE
from tf_gradcomp.exchange import saving
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.gradients import divided
from tf_gradcomp.exchange.method import Candidate, Method
from tf_gradcomp.exchange.replacing import method_in_place_of
from tf_gradcomp.groups.current import group_finder, group_here
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras.common import equal_values, losses
from tf_gradcomp.keras.common.adafactor import check_keeps_zeros, loses_zeros
from tf_gradcomp.keras.common.facts import facts_of
from tf_gradcomp.keras.common.inner import check_not_by_horovod, in_loss_scaler
from tf_gradcomp.keras.common.precondition import (
    check_moments_are_its_own,
    check_unchanged,
    take_moments,
)
from tf_gradcomp.keras.common.version import keras, keras_module
from tf_gradcomp.policy import Policy

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


class Compressed:
    """The part of an optimizer's wrapper that is the same whichever Keras the optimizer is of.

    The wrapper derives from this and from its Keras' optimizer, and calls `_set_up` when it is
    made, `_build_exchange` and `_take_moments` when its variables are known, and
    `_reduction_of` in each step.

    Attributes:
        inner_optimizer: What applies the sum of the gradients.
        exchange: What sums the gradients over the replicas.
        precondition: As the wrapper was given it.
        reduction: As the wrapper was given it.
    """

    name: str
    built: bool
    inner_optimizer: Any
    exchange: GradientExchange
    precondition: str | None
    reduction: str | None

    def _set_up(
        self,
        inner: Any,
        compressor: compressors.Compressor | Mapping[str, Any] | str,
        policy: Policy | None,
        precondition: str | None,
        group: str | Group | None,
        reduction: str | None,
    ) -> None:
        keras_module("patches").install()
        self._find_group = group_finder(group)
        self.reduction = checked_reduction(reduction)
        self.inner_optimizer = inner
        self.precondition = precondition
        self._given = compressors.get(compressor)
        self._used = method_in_place_of(self._given)
        possible = self._prepared_for = self._possible_preconditioner()
        lags = loses_zeros(self._core) or (bool(possible) and precondition is None)
        methods = compressors.methods_of(self._used, lags=lags)
        candidates = [self._candidate(method) for method in methods]
        if measuring.is_on():
            candidates = [Candidate(compressors.get(BASELINE))]
        method = Method(repr(self._used), candidates, choose, possible)
        self.exchange = GradientExchange(method, policy, self._find_group)
        self._values_agreed = False
        check_group(self.group)

    _deserialized: ClassVar[Callable[..., Any]] = staticmethod(keras.optimizers.deserialize)
    # Gives an optimizer and all that it wraps.
    _within: ClassVar[Callable[..., Iterable[Any]]] = staticmethod(in_loss_scaler)

    @property
    @abc.abstractmethod
    def _core(self) -> Any:
        """The optimizer that updates: the inner one, or that inside the inner loss scaler."""

    @property
    @abc.abstractmethod
    def _built_for(self) -> Sequence[Any]:
        """All variables of the model that it was built for."""

    @property
    @abc.abstractmethod
    def _inner_variables(self) -> Sequence[Any]:
        """All variables of the inner optimizer."""

    def _possible_preconditioner(self) -> Preconditioner | None:
        """Returns the preconditioner that the inner optimizer allows, if any."""
        return keras_module("adam").possible_preconditioner(self._core)

    def preconditioner_of(self, compressor: compressors.Compressor) -> Preconditioner | None:
        """Returns the preconditioner that this optimizer puts in front of a compressor, if any."""
        adam = keras_module("adam")
        return adam.preconditioner_for(self._core, compressor, self.precondition)

    @abc.abstractmethod
    def _inner_state(self, variables: Sequence[Any]) -> InnerState | None:
        """The inner optimizer's state of some variables, on the replica that calls."""

    @abc.abstractmethod
    def _clip(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> Sequence[Gradient]:
        """Clips gradients as the inner optimizer does."""

    @abc.abstractmethod
    def _momentum_only(
        self, divided: Sequence[Any], delayed: Sequence[tf.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Within it, the inner optimizer takes gradients of these variables as divided already.

        Args:
            divided: The variables.
            delayed: For each of them a bool scalar, whether its gradient goes past the momentum.
        """

    def _stepping(self, variables: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Within it, the inner optimizer applies the sums for these variables."""
        if not self.exchange.setup.preconditioner:
            return contextlib.nullcontext()
        divided = [v for v in variables if self.exchange.is_divided(v)]
        return self._momentum_only(divided, self.exchange.delayed(divided))

    @property
    def compressor(self) -> compressors.Compressor | compressors.Auto:
        """The compression method in use, or the choice of one."""
        return self._used

    @property
    def group(self) -> Group:
        """The replicas that exchange gradients: of the strategy in scope, or those of Horovod."""
        return self._find_group()

    def _candidate(self, compressor: compressors.Compressor) -> Candidate:
        return Candidate(compressor, self.preconditioner_of(compressor))

    def _build_exchange(self, variables: Sequence[Any]) -> None:
        for inside in self._within(self.inner_optimizer):
            check_moments_are_its_own(inside)
        with tf.init_scope():  # a config reads variables
            check_unchanged(self._prepared_for, self._possible_preconditioner())
            facts = {
                **facts_of("inner optimizer", self.inner_optimizer),
                "precondition": self.precondition,
                "reduction": "mean" if self._takes_means() else "sum",
            }
        self.exchange.build(variables, facts)
        check_keeps_zeros(
            self._core, self.exchange.compressor, self.exchange.specs, self.group.size
        )
        if measuring.is_on():
            measure = self._new_measuring().timing
            self.exchange.take_step = measure(self.exchange.take_step)

    def _take_moments(self) -> None:
        """From now on, the inner optimizer's second moments are of use to this wrapper only."""
        if self.exchange.setup.preconditioner:
            for inside in self._within(self.inner_optimizer):
                take_moments(inside)

    def _new_measuring(self) -> measuring.Measuring:
        methods = [*compressors.Auto().candidates, *compressors.methods_of(self._used)]
        each = {compressors.text_of(method): method for method in methods}
        candidates = [self._candidate(method) for method in each.values()]
        return measuring.Measuring(self.group, self.exchange.specs, candidates)

    def _takes_means(self) -> bool:
        """True if the inner optimizer gets the mean of the replicas' gradients, not the sum."""
        if self.reduction is None:
            return not self.group.loss_is_divided
        return self.reduction == "mean"

    def _shares(self, grads: Sequence[Gradient]) -> list[Gradient]:
        """Returns the gradients as this replica adds them to the sums."""
        means = self._takes_means()
        losses.tell_of_wrong_share(means=means)
        if not means:
            return list(grads)
        return [divided(gradient, self.group.all_replicas.size) for gradient in grads]

    def _reduction_of(self, variables: Sequence[Any]) -> Callable[..., Any]:
        """Returns the function that sums gradients of some variables over the replicas.

        `Group.each_replica` calls the function. It returns the sums and whether all were finite.
        """
        self._agree_on_values()
        inner = InnerOptimizer(self._inner_state, self._clip)
        return functools.partial(self.exchange.reduce, variables=variables, inner=inner)

    def _agree_on_values(self) -> None:
        """Compares the ranks' models before the first exchange, if no strategy makes them equal."""
        if self._values_agreed or self.group.by_strategy:
            return
        with tf.init_scope():
            values = self._built_for, self._inner_variables
            equal_values.agree_on_values(self.group, *values, equal_values.TRAINING)
        self._values_agreed = True

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of updates."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Excludes variables from the inner optimizer's weight decay."""
        self._core.exclude_from_weight_decay(*args, **kwargs)

    def collect_state(self) -> None:
        """Sums what workers keep for themselves, so that the chief can save it alone.

        The sums are of the residuals, of the second moments and of accumulated gradients. All
        workers must call this between the same two steps. Whatever the chief, or rank 0, saves
        until the next step holds the sums: `model.save`, `save_weights`, `tf.train.Checkpoint`.
        `fit` under a strategy does so by itself at the end of each epoch.

        Raises:
            ValueError: If the optimizer is not built.
            WorkersDisagreeError: If the other ranks do something else, or have other weights, or
                another learning rate or other state that all ranks share; or on this one, if they
                do not come within an hour, as they don't where they have more batches.
        """
        if not self.built:
            raise ValueError(
                "collect_state: the optimizer has no state yet; call "
                "optimizer.build(model.trainable_variables) first."
            )
        if not self.group.by_strategy:
            values = self._built_for, self._inner_variables
            equal_values.agree_on_values(
                self.group, *values, equal_values.SAVING, saving.COLLECT_SECONDS
            )
        self.exchange.saving.collect()

    def get_config(self) -> dict[str, Any]:
        """The config, for `from_config` and Keras' saving."""
        return {
            "name": self.name,
            "inner_optimizer": keras.optimizers.serialize(self.inner_optimizer),
            "compressor": compressors.serialize(self._given),
            "policy": self.exchange.policy.get_config(),
            "precondition": self.precondition,
            "reduction": self.reduction,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """The optimizer that `get_config` described.

        Who exchanges gradients is no part of that: the replicas of the strategy in scope; or those
        of Horovod, if the program has initialized it for several processes.

        Raises:
            ValueError: If `hvd.DistributedOptimizer` is around it.
        """
        check_not_by_horovod(cls)
        inner = cls._deserialized(config["inner_optimizer"], custom_objects=custom_objects)
        make: Any = cls
        return make(
            inner,
            config["compressor"],
            policy=Policy(**config["policy"]),
            precondition=config["precondition"],
            reduction=config.get("reduction"),  # files of before had none
            name=config["name"],
            group=group_here(),
        )


def compressed_in(optimizer: Any) -> Iterator[Compressed]:
    """The wrappers in an optimizer: itself, in a loss scaler, or in a Keras `MultiOptimizer`."""
    if isinstance(optimizer, Compressed):
        yield optimizer
        return
    inside = getattr(optimizer, "inner_optimizer", None)
    for one in [inside] if inside is not None else getattr(optimizer, "optimizers", ()):
        yield from compressed_in(one)


def optimizers_of(model: keras.Model) -> Iterator[Any]:
    """The optimizer that a model was compiled with, then those that it has beside it, as a GAN."""
    first = getattr(model, "optimizer", None)  # a layer that is saved has none
    if first is not None:
        yield first
    for value in vars(model).values():
        if hasattr(value, "apply_gradients") and value is not first:
            yield value


def wrappers_of(model: keras.Model) -> Iterator[Compressed]:
    """The wrappers in all of a model's optimizers."""
    for optimizer in optimizers_of(model):
        yield from compressed_in(optimizer)


def exchanging_in(optimizer: Any) -> Iterator[Compressed]:
    """Returns the wrappers in an optimizer that have a built exchange.

    A wrapper without variables, as in a `MultiOptimizer`, never builds its exchange.
    """
    return (one for one in compressed_in(optimizer) if one.exchange.built)


def is_per_process(variable: Any, optimizer: Any) -> bool:
    """Returns whether a wrapper in an optimizer keeps `variable` separately on each replica."""
    return any(one.exchange.saving.is_per_process(variable) for one in exchanging_in(optimizer))


def compressed_optimizer(model: keras.Model) -> Any:
    """The `CompressedOptimizer` of a compiled model, which may be in a loss scaler; or None."""
    optimizer = model.optimizer
    while optimizer is not None and not isinstance(optimizer, Compressed):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizer


def checked_reduction(reduction: Any) -> str | None:
    """Returns the reduction that was given.

    Raises:
        ValueError: If there is no such reduction.
    """
    if reduction not in (None, "sum", "mean"):
        raise ValueError(
            'CompressedOptimizer: reduction must be "sum", "mean", or None for the sum under a '
            f"strategy and the mean under Horovod; received {reduction!r}."
        )
    return reduction


def check_group(group: Group) -> None:
    """Refuses groups whose replicas do not run here, or exchange their gradients already."""
    group.check_current()
    if isinstance(group, StrategyGroup) and getattr(group.strategy, "compressor", None) is not None:
        raise ValueError(
            "A compressor is set on both the strategy and the optimizer, and gradients would be "
            "compressed twice; give it to one: MultiWorkerMirroredStrategy(compressor=None), or "
            "the optimizer without CompressedOptimizer."
        )


def checked_replica_context() -> tf.distribute.ReplicaContext:
    """The context of the replica that calls; refuses a call from anywhere else."""
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError("apply() must be called in a replica context, inside strategy.run.")
    return context
