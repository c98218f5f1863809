"""The rounds of an optimizer whose workers take local steps, and what they exchange."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tf_gradcomp import tf_private, tf_private_files
from tf_gradcomp.adam.handover import InnerState
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.gradients import all_finite, native, times, with_gradients_to_exchange
from tf_gradcomp.exchange.state import own_variable, shared_variable
from tf_gradcomp.exchange.step import count_skip
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras.common.local_steps import LocalSteps
from tf_gradcomp.keras.common.pseudo_gradients import (
    beside_residuals,
    decay,
    drift,
    finite_or_zero,
    has_gradients_left,
    local_share,
)
from tf_gradcomp.keras.common.residual_units import ResidualUnits, forget_earlier_gradients
from tf_gradcomp.keras.common.round_lengths import length_at
from tf_gradcomp.keras.common.round_times import RoundTimes


@dataclasses.dataclass(frozen=True)
class _Variables:
    """The variables of rounds that no checkpoint holds: it is written between two rounds.

    Attributes:
        position: How many steps of the round are done.
        length: How many the round has.
        rounds: How many rounds have ended since the program started.
        drift: This worker's drift in the latest round. After `finish`, the mean over the workers.
        start: The common weights at the start of the round.
    """

    position: tf.Variable
    length: tf.Variable
    rounds: tf.Variable
    drift: tf.Variable
    start: list[tf.Variable]


class Rounds:
    """The rounds of an optimizer whose workers take local steps.

    Args:
        settings: The settings.
        exchange: Built for `variables`.
        units: Records the unit of the residual.
        variables: All variables that are trained.
        update: `update(strategy, means, variables)` gives the mean pseudo-gradients to the outer
            optimizer; called across replicas.
        inner: Returns the inner optimizer's state of some variables, on one of the process's
            replicas.
        slots: Returns all variables of the inner optimizer.
        statistics: Returns variables that are not trained, and averaged when a round ends early.
    """

    def __init__(
        self,
        settings: LocalSteps,
        exchange: GradientExchange,
        units: ResidualUnits,
        variables: Sequence[Any],
        update: Callable[[tf.distribute.Strategy, Sequence[Any], Sequence[Any]], None],
        inner: Callable[[Sequence[Any], int], InnerState | None],
        slots: Callable[[], Sequence[Any]],
        statistics: Callable[[], Sequence[Any]],
    ) -> None:
        known = {id(spec) for spec in with_gradients_to_exchange(exchange.specs)}
        pairs = zip(variables, exchange.specs, strict=True)
        exchanged = [variable for variable, spec in pairs if id(spec) in known]
        self._settings = settings
        self._group = cast(StrategyGroup, exchange.group)  # others are refused before
        self._update, self._inner = update, inner
        self._slots, self._statistics = slots, statistics
        self._exchange, self._variables = exchange, exchanged
        with tf.init_scope():
            self._own = self._group.create(lambda: _new_variables(exchanged))
            self._times = RoundTimes.of(settings, self._group)
        self._of_weights, self._steps = self._local(units.of_weights), self._local(units.steps)
        self._finished_at: list[int] = []
        self._finish = tf.function(self._finish_on_all, autograph=False)
        exchange.saving.take_over([], [self._local(self._own.position)])
        exchange.saving.finish_before(self)
        # Not every method has state that `Saving` restores.
        tf_private_files.save_as(
            native(units.of_weights), self._of_weights.read_value, self._restore_unit
        )

    def _restore_unit(self, of_weights: tf.Tensor) -> None:
        self._of_weights.assign(of_weights)
        self.abandon()

    def _local(self, variable: Any) -> tf.Variable:
        return self._group.local(native(variable), 0)

    @property
    def _weights(self) -> list[tf.Variable]:
        return [self._local(variable) for variable in self._variables]

    @property
    def _start(self) -> list[tf.Variable]:
        return [self._local(variable) for variable in self._own.start]

    @property
    def warmup_steps(self) -> int:
        """The number of steps of training before the first round."""
        return self._settings.warmup_steps

    @property
    def exchanges(self) -> tf.Variable:
        """The number of exchanges until now."""
        return self._local(self._exchange.step)

    def warms_up(self) -> tf.Tensor:
        """Returns whether the next step is synchronous."""
        return tf.less(self.exchanges, self._settings.warmup_steps)

    @property
    def position(self) -> int:
        """The number of steps since the round began."""
        return int(self._local(self._own.position).numpy())

    def measures(self) -> dict[str, float]:
        """Returns what `CompressionMonitor` logs."""
        own = self._own
        rounds, drifted, length = map(self._local, (own.rounds, own.drift, own.length))
        return {
            "rounds": int(rounds.numpy()),
            "drift": float(drifted.numpy()),
            "steps_per_round": int(length.numpy()),
        }

    def _steps_of_training(self) -> tf.Tensor:
        """Returns the number of steps of training until now."""
        return tf.maximum(self._steps, self._local(self._exchange.step))

    def count_step(self, *, counts: tf.Tensor | bool = True) -> None:
        """Counts a step of training, if it `counts`; called before its exchange."""
        self._steps.assign(self._steps_of_training() + tf.cast(counts, tf.int64))

    # The next methods run across replicas, of which each process has one.

    def step(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        take: Callable[[Sequence[Any], Sequence[Any]], None],
    ) -> tf.Tensor:
        """Takes a local step, and ends the round if this was the last one.

        Args:
            grads: The replica's share of the gradients.
            variables: Their variables.
            take: `take(grads, variables)` has the inner optimizer apply gradients on this replica
                alone.

        Returns:
            A bool scalar, whether the replica's gradients were finite.
        """
        position = self._local(self._own.position)
        tf.cond(tf.equal(position, 0), self._begin, lambda: None)
        grads = [times(gradient, self._group.size) for gradient in grads]
        finite = all_finite(grads)

        def with_residuals() -> None:
            every = beside_residuals(grads, variables, self._variables, finite)
            inner = self._inner(self._variables, 0)
            take(
                self._exchange.take_residuals(every, self._variables, size, inner), self._variables
            )

        # No branch here has a collective: each worker may go its own way.
        size, left = self._group.size, has_gradients_left(self._exchange, 0, self._of_weights)
        alone = lambda: tf.cond(finite, lambda: take(grads, variables), lambda: None)  # noqa: E731
        tf.cond(left, with_residuals, alone)
        tf.cond(self._of_weights, lambda: None, lambda: forget_earlier_gradients(self._exchange))
        self._of_weights.assign(True)
        count_skip(self._exchange.skipped_steps, finite)
        self.count_step()
        if self._times:
            self._times.end_step(finite)
        with tf.control_dependencies([position.assign_add(1)]):
            due = tf.greater_equal(position.read_value(), self._local(self._own.length))
        tf.cond(due, self._end, lambda: None)
        return finite

    def _begin(self) -> None:
        for start, weight in zip(self._start, self._weights, strict=True):
            start.assign(weight.read_value())
        if self._times:
            length = self._times.length
        else:
            length = length_at(self._settings.steps, self._steps_of_training())
        self._local(self._own.length).assign(length)

    def _end(self) -> None:
        strategy = tf.distribute.get_strategy()
        own, weights = self._own, [one.read_value() for one in self._weights]
        start = [one.read_value() for one in self._start]
        shares, counts = local_share(start, weights, self._group.size)
        self._local(own.drift).assign(drift(start, weights))
        count_skip(self._exchange.skipped_steps, counts)
        tf.cond(counts, lambda: None, self._mend_slots)
        decay(map(self._local, self._exchange.residuals), self._settings)
        means, finite = self._group.each_replica(self._exchange_shares, args=(shares,))
        finite = strategy.experimental_local_results(finite)[0]
        with tf.control_dependencies([finite]):
            for weight, value in zip(self._weights, start, strict=True):
                weight.assign(value)
        tf.cond(finite, lambda: self._update(strategy, means, self._variables), lambda: None)
        self._local(own.position).assign(0)
        self._local(own.rounds).assign_add(1)

    def _mend_slots(self) -> None:
        """Lets a worker whose weights overflowed train on: its momentum may have done so, too."""
        for slot in map(self._local, self._slots()):
            slot.assign(finite_or_zero(slot.read_value()))

    def _exchange_shares(self, shares: list[Any]) -> tuple[list[Any], tf.Tensor]:
        if self._times is None:
            return self._exchange.reduce(shares, self._variables)
        vote = self._exchange.reduce_and_vote
        return self._times.measured(lambda votes: vote(shares, self._variables, votes), shares)

    def _finish_on_all(self) -> None:
        def on_replica() -> None:
            tf.distribute.get_replica_context().merge_call(lambda strategy: self._end())

        self._group.strategy.run(on_replica)

    # The next methods run between two steps, outside of a graph.

    @property
    def pending(self) -> bool:
        """Returns whether the workers' weights differ, because a round has begun."""
        return self.position > 0

    def finish(self) -> None:
        """Ends the round now, and averages statistics; all workers call it between the same steps.

        Raises:
            WorkersDisagreeError: If the other workers do something else, or are at another step.
        """
        steps = [self._exchange.exchanges, self.position]
        if self._group.size == 1 or steps == self._finished_at:
            return
        self._group.agree({"next action": "ending a round", "exchanges and steps": steps})
        if self.pending:
            self._finish()
        averaged = [v for v in self._statistics() if tf.as_dtype(v.dtype).is_floating]
        self._average([self._local(variable) for variable in (self._own.drift, *averaged)])
        self._finished_at = [self._exchange.exchanges, 0]
        if self._times:
            self._times.pause()

    def _average(self, variables: Sequence[tf.Variable]) -> None:
        """Averages variables over the workers on which they are finite, entry by entry."""
        own = np.concatenate([np.float64(variable.numpy()).ravel() for variable in variables])
        finite = np.isfinite(own)
        with tf.device("CPU:0"):
            flat = tf.constant(np.stack([np.where(finite, own, 0.0), finite]))
            total, workers = tf_private.sum_over_workers(self._group.strategy, flat).numpy()
        means = np.divide(total, workers, out=own, where=workers > 0)
        ends = np.cumsum([variable.shape.num_elements() for variable in variables])[:-1]
        for variable, mean in zip(variables, np.split(means, ends), strict=True):
            variable.assign(mean.reshape(variable.shape).astype(variable.dtype.as_numpy_dtype))

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Within this context, this worker has the common weights of the start of the round."""
        own = [weight.read_value() for weight in self._weights]
        for weight, start in zip(self._weights, self._start, strict=True):
            weight.assign(start.read_value())
        try:
            yield
        finally:
            for weight, value in zip(self._weights, own, strict=True):
                weight.assign(value)

    def abandon(self) -> None:
        """Begins a new round at the next step, from the weights that this worker has then."""
        self._local(self._own.position).assign(0)
        if self._times:
            self._times.pause()

    def give_back(self) -> None:
        """Gives the weights what a larger job has left in the residuals; for the only replica."""

        def give() -> None:
            zeros = [tf.zeros(v.shape, v.dtype) for v in self._variables]
            left = self._exchange.take_residuals(zeros, self._variables)
            for weight, rest in zip(self._weights, left, strict=True):
                weight.assign_sub(rest)
            forget_earlier_gradients(self._exchange)
            self._of_weights.assign(False)

        tf.cond(self._of_weights, give, lambda: None)


def measures_of_rounds(optimizer: Any) -> dict[str, float]:
    """Returns the number of rounds of local steps and the latest drift; nothing without rounds."""
    rounds = optimizer.rounds
    several = rounds is not None and optimizer.exchange.group.size > 1
    return rounds.measures() if rounds and several else {}


def _new_variables(trained: Sequence[Any]) -> _Variables:
    start = [
        own_variable(tf.zeros(v.shape, v.dtype), f"{v.path.replace('/', '_')}_start", True)
        for v in trained
    ]
    return _Variables(
        position=shared_variable(0, tf.int64, "steps_in_round"),
        length=shared_variable(0, tf.int64, "steps_of_round"),
        rounds=shared_variable(0, tf.int64, "rounds"),
        drift=own_variable(0.0, "drift", True),
        start=start,
    )
