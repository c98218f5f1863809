"""The rounds of an optimizer whose workers take local steps, and their exchanges."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import tensorflow as tf

from tf_gradcomp.adam.handover import InnerState
from tf_gradcomp.compressors.base import GRADIENT_UNITS, RESIDUAL, Hook
from tf_gradcomp.exchange.calls import call_in_python
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.gradients import (
    all_finite,
    native,
    times,
    values_or_fill,
    with_gradients_to_exchange,
)
from tf_gradcomp.exchange.replica import Replica
from tf_gradcomp.exchange.restored import take_residuals
from tf_gradcomp.exchange.state import assign, shared_variable
from tf_gradcomp.exchange.step import count_skip
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.means import PeriodicReduce
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras.common import equality
from tf_gradcomp.keras.local.fragments import Fragment, due_after, flatten, split, unflatten
from tf_gradcomp.keras.local.local_steps import LocalSteps, length_at
from tf_gradcomp.private import tensorflow as tf_private

# Has the inner optimizer apply gradients to variables, on this worker alone.
Take: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], None]


def local_share(moved: tf.Tensor, replicas: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a replica's share of the mean pseudo-gradient, and whether its round counts.

    Args:
        moved: The weights at the start of the round minus the replica's weights now: float32
            vector.
        replicas: The number of replicas.

    Returns:
        The differences, divided by the number of replicas, or zeros if a weight is not finite; and
        a bool scalar, whether all weights are finite.
    """
    counts = all_finite([moved])
    # Zeros where it divides by zero. A choice between two vectors would take more memory.
    return tf.math.divide_no_nan(moved, tf.where(counts, float(replicas), 0.0)), counts


def has_gradients_left(
    exchange: GradientExchange, local_replica: int, in_weight_units: tf.Tensor
) -> tf.Tensor:
    """Whether synchronous steps have left state that rounds cannot use."""
    facts = (exchange.facts.has_residual, exchange.facts.moments_taken)
    flags = tf.concat([exchange.group.local(fact, local_replica) for fact in facts], 0)
    return tf.logical_and(tf.logical_not(in_weight_units), tf.reduce_any(flags))


def gradients_for_residuals(
    grads: Sequence[Any], variables: Sequence[Any], every: Sequence[Any], finite: tf.Tensor
) -> list[Any]:
    """Returns a gradient for each variable, so that the residuals of all variables can be added.

    Args:
        grads: The gradients of some variables.
        variables: The variables of `grads`.
        every: All variables.
        finite: Whether the gradients are finite; otherwise they are replaced by zeros.

    Returns:
        The gradients of `every`; zeros for a variable without a gradient.
    """
    zeros = [tf.zeros(variable.shape, variable.dtype) for variable in every]
    gradient_by_id = dict(zip(map(id, variables), values_or_fill(finite, grads, 0.0), strict=True))
    return [gradient_by_id.get(id(v), zero) for v, zero in zip(every, zeros, strict=True)]


def finite_or_zero(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with zeros in place of non-finite values; integers stay unchanged."""
    if not value.dtype.is_floating:
        return value
    return tf.where(tf.math.is_finite(value), value, tf.zeros_like(value))


def decay(residuals: Iterable[tf.Variable], settings: LocalSteps) -> None:
    """Multiplies residuals by the settings' decay, before the exchange of a round adds to them."""
    if settings.residual_decay < 1:
        for residual in residuals:
            residual.assign(residual.read_value() * settings.residual_decay)


def drift(moved: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
    """Returns the norm of a change of weights, relative to the norm of the weights before it."""
    return tf.math.divide_no_nan(tf.linalg.global_norm([moved]), tf.linalg.global_norm([start]))


class ResidualUnits(tf.Module):
    """Records the unit of the residual of an exchange.

    Attributes:
        in_weight_units: bool, whether the residual is a difference of weights. Without local steps,
            and during their warm-up, the residual is a gradient.
        steps: int64, the number of training steps so far; 0 after a job without local steps.

    Args:
        group: The replicas.
        local: Whether the job takes local steps; a job without local steps refuses a residual of
            weights.
    """

    def __init__(self, group: Group, *, local: bool) -> None:
        super().__init__(name="residual_units")
        self.in_weight_units = group.create(
            lambda: shared_variable(False, tf.bool, "residual_in_weight_units")
        )
        self.steps = group.create(lambda: shared_variable(0, tf.int64, "steps_of_training"))
        if not local:
            tf_private.save_as(self.in_weight_units, lambda: tf.constant(False), refuse_weights)
            none = tf.constant(0, tf.int64)
            tf_private.save_as(self.steps, lambda: none, lambda steps: None)


def refuse_weights(in_weight_units: tf.Tensor) -> None:
    """Refuses the residual of a checkpoint if it is a difference of weights."""
    if bool(in_weight_units):
        raise ValueError(
            "The checkpoint holds the residual of a job with local steps, which is a difference "
            "of weights, not a gradient. Continue with gc.LocalSteps, or restore only the model's "
            "weights."
        )


def forget_earlier_gradients(exchange: GradientExchange, local_replica: int = 0) -> None:
    """Sets a replica's state from earlier gradients to zeros, except its residual.

    A change of units makes such state useless: TopK's velocity of gradients, for example, does not
    fit differences of weights.
    """
    replica = exchange.replica(local_replica)
    state, job_state = replica.state(), replica.job_state()
    variables = [job_state[name] for name in exchange.setup.job_state_in_gradient_units]
    for name in GRADIENT_UNITS:
        variables += state.get(name, []) if name != RESIDUAL else []
    for variable in variables:
        variable.assign(tf.zeros_like(variable))


@dataclasses.dataclass(frozen=True)
class _Variables:
    """The variables of rounds; no checkpoint holds them, because it is written between rounds.

    In a cycle, each fragment is exchanged once. A single fragment's rounds are the cycles.

    Attributes:
        position: The number of steps of the cycle so far.
        length: The number of steps of the cycle.
        rounds: The number of rounds of all fragments that have ended in this program.
        since: The number of steps since all workers had one model.
        fragments: The fragments, in the order in which they are exchanged.
    """

    position: tf.Variable
    length: tf.Variable
    rounds: tf.Variable
    since: tf.Variable
    fragments: list[Fragment]


class LocalOptimizer(Protocol):
    """What `Rounds` need of the optimizer whose workers take local steps."""

    def update_common(
        self, strategy: tf.distribute.Strategy, means: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        """Gives mean pseudo-gradients to the outer optimizer; called across replicas."""

    def inner_state(self, variables: Sequence[Any], local_replica: int) -> InnerState | None:
        """Returns the inner optimizer's state of some variables, on a replica of the process."""

    def inner_slots(self) -> Sequence[Any]:
        """Returns all variables of the inner optimizer."""

    def inner_updates(self) -> tf.Tensor:
        """Returns the inner optimizer's number of updates, on a replica of the process: int64."""

    def reconcile(self, model: Any) -> None:
        """Gives a model equal variables on all workers."""


class Rounds(Hook):
    """The rounds of an optimizer whose workers take local steps.

    Args:
        settings: The settings.
        exchange: Built for `variables`.
        units: Records the unit of the residual.
        variables: All variables that are trained.
        optimizer: The optimizer.

    Attributes:
        exchanges: The exchanges that end rounds, and the exchanges of the warm-up.
    """

    def __init__(
        self,
        settings: LocalSteps,
        exchange: GradientExchange,
        units: ResidualUnits,
        variables: Sequence[Any],
        optimizer: LocalOptimizer,
    ) -> None:
        # By identity, because a filtered list has lost the indices.
        known = {id(spec) for spec in with_gradients_to_exchange(exchange.specs)}
        indices = [i for i, spec in enumerate(exchange.specs) if id(spec) in known]
        self._settings = settings
        self._group = cast(StrategyGroup, exchange.group)  # others have been refused earlier
        self._replicas = cast(StrategyGroup, exchange.group.all_replicas)
        self._optimizer = optimizer
        self._models: list[weakref.ref[Any]] = []
        self._exchange, self._indices = exchange, indices
        self._replica = Replica(exchange.setup, indices)
        self._variables = [variables[i] for i in indices]
        with tf.init_scope():
            self._state = self._group.create(lambda: self._new_variables(variables, indices))
        self._in_weight_units, self._steps = (
            self._local(units.in_weight_units),
            self._local(units.steps),
        )
        self.exchanges = PeriodicReduce(self._local(exchange.step))
        # Models whose variables were made equal on all workers since the latest step.
        self._equal: weakref.WeakSet[Any] = weakref.WeakSet()
        # Functions, so that the graph of a step and `finish` share one trace of a round's end.
        self._end_round = tf.function(self._end_of, autograph=False)
        self._finish = tf.function(self._finish_on_all, autograph=False)
        exchange.saving.register([], [self._local(self._state.position)])
        exchange.hooks.add(self)
        # Restored by itself: `Saving` restores nothing if the method has no state.
        unit = native(units.in_weight_units)
        tf_private.save_as(unit, self._in_weight_units.read_value, self._restore_unit)

    def _new_variables(self, variables: Sequence[Any], indices: Sequence[int]) -> _Variables:
        elements = [self._exchange.specs[index].elements for index in indices]
        residuals, fragments = self._exchange.residuals, []
        for fragment_indices in split(elements, self._settings.fragments):
            variable_indices = [indices[i] for i in fragment_indices]
            fragment_residuals = (
                [residuals[index] for index in variable_indices] if residuals else []
            )
            fragments.append(
                Fragment(self._group, [variables[n] for n in variable_indices], fragment_residuals)
            )
        return _Variables(
            position=shared_variable(0, tf.int64, "steps_in_cycle"),
            length=shared_variable(0, tf.int64, "steps_of_cycle"),
            rounds=shared_variable(0, tf.int64, "rounds"),
            since=shared_variable(0, tf.int64, "steps_since_one_model"),
            fragments=fragments,
        )

    def _restore_unit(self, in_weight_units: tf.Tensor) -> None:
        self._in_weight_units.assign(in_weight_units)
        self.abandon()

    def _local(self, variable: Any) -> tf.Variable:
        return self._group.local(native(variable), 0)

    @property
    def warmup_steps(self) -> int:
        """The number of steps of training before the first round."""
        return self._settings.warmup_steps

    def in_warmup(self) -> tf.Tensor:
        """Whether the next step is synchronous: never while residuals are of weights."""
        early = tf.less(self._steps_of_training(), self._settings.warmup_steps)
        return tf.logical_and(early, tf.logical_not(self._in_weight_units))

    @property
    def position(self) -> int:
        """The number of steps since the cycle began."""
        return int(self._local(self._state.position).numpy())

    def measures(self) -> dict[str, float]:
        """Returns the values that `CompressionMonitor` logs."""
        state = self._state
        rounds, length = (
            int(self._local(counter).numpy()) for counter in (state.rounds, state.length)
        )
        drifted = np.mean([fragment.drift.numpy() for fragment in state.fragments])
        return {"rounds": rounds, "drift": float(drifted), "steps_per_round": length}

    def _steps_of_training(self) -> tf.Tensor:
        """Returns the number of steps of training so far."""
        # A job without local steps counts no steps, but its inner optimizer counts updates.
        return tf.where(tf.equal(self._steps, 0), self._optimizer.inner_updates(), self._steps)

    def count_step(self, *, counts: tf.Tensor | bool = True) -> None:
        """Counts a step of training if `counts`; called before the inner optimizer's step."""
        self._steps.assign(self._steps_of_training() + tf.cast(counts, tf.int64))
        self._local(self._state.since).assign_add(1)

    # The next methods run across replicas, once in each worker.

    def sum_over_replicas(self, grads: Sequence[Any]) -> list[Any]:
        """Returns the sums of gradients over the replicas of this worker."""
        sums = self._group.each_replica(lambda local_gradients: local_gradients, args=(grads,))
        return [tf.distribute.get_strategy().experimental_local_results(total)[0] for total in sums]

    def step(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        take: Take,
    ) -> tf.Tensor:
        """Takes a local step, and ends the rounds that are then complete.

        Args:
            grads: The worker's share of the gradients.
            variables: The variables of `grads`.
            take: Called with gradients and their variables.

        Returns:
            A bool scalar, whether the worker's gradients were finite.
        """
        position = self._local(self._state.position)
        begins = tf.equal(position, 0)
        self._set_length(begins)
        self.count_step()
        begun = [fragment.begin() for fragment in self._state.fragments]
        grads = [times(gradient, self._group.size) for gradient in grads]
        finite = all_finite(grads)
        # The next parts wait for each other, also across steps in one graph: TensorFlow does not
        # know which variables Python reads and writes.
        with tf.control_dependencies([begins, *begun]):
            taken = self._take(grads, variables, finite, take)
        tf.cond(
            self._in_weight_units, lambda: None, lambda: forget_earlier_gradients(self._exchange)
        )
        self._in_weight_units.assign(True)
        count_skip(self._exchange.skipped_steps, finite)
        with tf.control_dependencies([taken]):
            self._end_due(position)
        return finite

    def _take(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        finite: tf.Tensor,
        take: Take,
    ) -> tf.Tensor:
        """Takes the inner optimizer's step, if gradients are finite; returns a tensor to wait for.

        If synchronous steps have left residuals, they are added.
        """

        def update() -> tf.Tensor:
            take(grads, variables)
            return tf.constant(True)

        with_residuals = functools.partial(
            self._take_with_residuals, grads, variables, finite, take
        )
        none = tf.constant(False)
        # No branch here has a collective, so workers may take different branches.
        has_delayed = has_gradients_left(self._exchange, 0, self._in_weight_units)
        takes = tf.logical_and(finite, tf.logical_not(has_delayed))
        return tf.logical_or(
            tf.cond(has_delayed, with_residuals, lambda: none),
            tf.cond(takes, update, lambda: none),
        )

    def _take_with_residuals(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        finite: tf.Tensor,
        take: Take,
    ) -> tf.Tensor:
        """Takes a step of all variables, with gradients plus the residuals of synchronous steps."""

        def update(gradients: Sequence[Any], finite: tf.Tensor, updates: tf.Tensor) -> tf.Tensor:
            every = gradients_for_residuals(gradients, variables, self._variables, finite)
            inner = self._optimizer.inner_state(self._variables, 0)
            inner = inner and dataclasses.replace(inner, updates=updates)
            totals = take_residuals(self._replica, every, self._group.size, inner)
            # Traced here: few jobs need it, and TensorFlow warns of eager steps under a strategy.
            tf.function(lambda: take(totals, self._variables), autograph=False)()
            return tf.constant(True)

        arguments = (list(grads), finite, self._optimizer.inner_updates())
        return call_in_python(self._group, update, arguments, tf.TensorSpec([], tf.bool))

    def _set_length(self, begins: tf.Tensor) -> None:
        """Sets the number of steps of a cycle that begins now."""
        length, steps = self._local(self._state.length), self._settings.steps
        now = self._steps_of_training()
        if callable(steps):  # the program's function is called only for new cycles
            new = tf.cond(begins, lambda: length_at(steps, now), length.read_value)
        else:
            new = tf.where(begins, length_at(steps, now), length)
        length.assign(new)

    def _end_due(self, position: tf.Variable) -> None:
        """Counts the step, and ends the rounds that are complete."""
        length = self._local(self._state.length).read_value()
        with tf.control_dependencies([position.assign_add(1)]):
            now = position.read_value()
        fragments, ended = self._state.fragments, []
        for index, fragment in enumerate(fragments):
            fragment.steps.assign_add(1)
            due = tf.equal(now, due_after(index, len(fragments), length))
            end = functools.partial(self._end_round, index)
            ended.append(tf.cond(due, end, lambda: tf.constant(False)))
        with tf.control_dependencies(ended):
            position.assign(tf.where(tf.less(now, length), now, tf.zeros_like(now)))

    def _end_of(self, index: int) -> tf.Tensor:
        self._end(self._state.fragments[index])
        return tf.constant(True)

    def _end(self, fragment: Fragment) -> None:
        strategy = tf.distribute.get_strategy()
        start = fragment.start.read_value()
        moved = start - flatten(fragment.weights)
        share, counts = local_share(moved, self._group.all_replicas.size)
        fragment.drift.assign(drift(moved, start))
        count_skip(self._exchange.skipped_steps, counts)
        tf.cond(counts, lambda: None, self._reset_overflowed_slots)
        decay(fragment.residuals, self._settings)
        exchange = functools.partial(self._exchange.reduce, variables=fragment.variables)
        shares = unflatten(share, fragment.weights)
        means, finite, *_ = self._group.each_replica(exchange, args=(shares,))
        finite = strategy.experimental_local_results(finite)[0]
        if self._settings.outer is None:
            mean = flatten([strategy.experimental_local_results(mean)[0] for mean in means])
            takes = tf.cast(finite, tf.float32)
            fragment.assign_weights(start - tf.math.multiply_no_nan(mean, takes))
        else:
            with tf.control_dependencies([finite]):
                fragment.assign_weights(start)
            tf.cond(finite, lambda: self._update_common(strategy, means, fragment), lambda: None)
        fragment.steps.assign(0)
        self._local(self._state.rounds).assign_add(1)

    def _update_common(
        self, strategy: tf.distribute.Strategy, means: Sequence[Any], fragment: Fragment
    ) -> None:
        """Updates a fragment with the outer optimizer, at the fragment's update count.

        Adam's bias correction and learning rate schedules use this number. Between updates, and in
        checkpoints, the optimizer has the largest number of any fragment.
        """
        steps = self._local(self._settings.outer.iterations)
        updates_by_fragment = [fragment.updates for fragment in self._state.fragments]
        total = steps.read_value()
        # A checkpoint or the program may have set the optimizer's number.
        is_known = tf.equal(tf.reduce_max(tf.stack(updates_by_fragment)), total)
        for updates in updates_by_fragment:
            updates.assign(tf.where(is_known, updates, total))
        steps.assign(fragment.updates)
        self._optimizer.update_common(strategy, means, fragment.variables)
        fragment.updates.assign(steps)
        steps.assign(tf.maximum(total, steps))

    def _reset_overflowed_slots(self) -> None:
        """Resets momentum that has overflowed, so that a worker can return to finite weights."""

        def reset() -> tf.Tensor:
            for slot in map(self._local, self._optimizer.inner_slots()):
                slot.assign(finite_or_zero(slot.read_value()))
            return tf.constant(True)

        call_in_python(self._group, reset, [], tf.TensorSpec([], tf.bool))

    def _finish_on_all(self, index: int) -> None:
        def on_replica() -> None:
            tf.distribute.get_replica_context().merge_call(lambda _: self._end_round(index))

        self._group.strategy.run(on_replica)

    # The next methods run between two steps, outside a graph.

    def add_model(self, model: Any) -> None:
        """Adds a model whose variables become equal on all workers when rounds end early."""
        if not any(known() is model for known in self._models):
            self._models.append(weakref.ref(model))

    def _known_models(self) -> list[Any]:
        return [model for model in (known() for known in self._models) if model is not None]

    def _has_others(self, model: Any) -> bool:
        """Whether a model has variables that the optimizer does not train."""
        trained = {id(variable) for variable in self._variables}
        return any(id(variable) not in trained for variable in model.variables)

    @property
    def pending(self) -> bool:
        """Whether the workers' weights or other variables may differ."""
        stepped = self._local(self._state.since).numpy()
        others_differ = stepped and any(map(self._has_others, self._known_models()))
        return others_differ or any(fragment.has_begun for fragment in self._state.fragments)

    def finish(self) -> None:
        """Ends all rounds now, and makes models equal; all workers call it between the same steps.

        Raises:
            WorkersDisagreeError: If the other workers do something else, are at another step, or
                have other weights or settings.
        """
        if self._group.size == 1:
            return
        since, models = self._local(self._state.since), self._known_models()
        if since.numpy():
            steps = [self._exchange.exchanges, self.position]
            action = {"next action": "ending a round", "exchanges and steps": steps}
            self._group.processes.agree(action)
            self._end_early()
            self._local(self._state.position).assign(0)
            equality.average(self._replicas, [fragment.drift for fragment in self._state.fragments])
            since.assign(0)
            self._equal.clear()
        else:  # without a step, only models that are new here
            models = [m for m in models if self._has_others(m) and m not in self._equal]
        for model in models:
            self._optimizer.reconcile(model)
            self._equal.add(model)

    def _end_early(self) -> None:
        """Assigns the common weights on all workers."""
        for index, fragment in enumerate(self._state.fragments):
            if fragment.has_begun:
                # Each fragment has a trace. TensorFlow warns of many only if `_finish` is called.
                self._finish.get_concrete_function(index)()

    @contextlib.contextmanager
    def rolled_back(self) -> Iterator[None]:
        """Gives this worker the common weights of the start of each round, within this context."""
        begun_fragments = [fragment for fragment in self._state.fragments if fragment.has_begun]
        weights = [weight for fragment in begun_fragments for weight in fragment.weights]
        values = [weight.read_value() for weight in weights]
        for fragment in begun_fragments:
            fragment.assign_weights(fragment.start.read_value())
        try:
            yield
        finally:
            assign(weights, values)

    def abandon(self) -> None:
        """Begins new rounds at the next step, from this worker's weights at that time."""
        self._local(self._state.since).assign(0)
        self._equal.clear()
        self._local(self._state.position).assign(0)
        for fragment in self._state.fragments:
            fragment.steps.assign(0)

    def apply_residuals(self) -> None:
        """Applies the residuals of a larger job to the weights of a job's only replica."""

        def give() -> None:
            zeros = [tf.zeros(v.shape, v.dtype) for v in self._variables]
            residuals = take_residuals(self._replica, zeros)
            for variable, residual in zip(self._variables, residuals, strict=True):
                self._local(variable).assign_sub(residual)
            forget_earlier_gradients(self._exchange)
            self._in_weight_units.assign(False)

        tf.cond(self._in_weight_units, give, lambda: None)


def measures_of_rounds(optimizer: Any) -> dict[str, float]:
    """Returns the number of rounds of local steps and the latest drift; nothing without rounds."""
    rounds = optimizer.rounds
    several = rounds is not None and optimizer.exchange.group.size > 1
    return rounds.measures() if rounds and several else {}
