"""What learners keep apart: weights in rounds of local steps, and Adam's second moments."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_gradcomp.adam.handover import HandOver, InnerState
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.gradients import all_finite, native, times
from tf_gradcomp.exchange.restored import take_residuals
from tf_gradcomp.exchange.state import assign
from tf_gradcomp.exchange.step import StepResult, count_skip
from tf_gradcomp.groups.communicator import Sent
from tf_gradcomp.keras.common.second_moments import inner_state
from tf_gradcomp.keras.local.fragments import due_after, flatten, split, unflatten
from tf_gradcomp.keras.local.local_steps import LocalSteps, length_at
from tf_gradcomp.keras.local.rounds import (
    decay,
    finite_or_zero,
    forget_earlier_gradients,
    gradients_for_residuals,
    has_gradients_left,
    local_share,
)
from tf_gradcomp.keras_version import IS_KERAS_2, keras, keras_private

Reduce: TypeAlias = Callable[[list[list[Any]]], StepResult]


class LearnersRounds:
    """Takes learners in one process through rounds, as `Rounds` does for a worker.

    The model takes the weights and the optimizer's state of one learner after another. Between two
    steps, the model has the first learner's weights and state, or the common weights if no round
    has begun. A value that the program gives a weight or the optimizer then holds for all learners:
    in a job, each worker's program sets it.

    Args:
        model: Compiled with a plain optimizer, which is built.
        settings: The settings.
        exchange: The exchange of the learners.
    """

    def __init__(
        self, model: keras.Model, settings: LocalSteps, exchange: GradientExchange
    ) -> None:
        self._settings, self._exchange = settings, exchange
        self._size = exchange.group.size
        self._variables = model.trainable_variables
        elements = [spec.elements for spec in exchange.specs]
        self._fragments = split(elements, settings.fragments)
        self._begun_fragments: set[int] = (
            set()
        )  # the indices of the fragments whose round has begun
        self._updates = [0] * len(self._fragments)  # of the outer optimizer
        if settings.outer is not None:
            settings.outer.build(self._variables)
        self._weights = [native(variable) for variable in self._variables]
        slots = [native(variable) for variable in keras_private.state_variables(model.optimizer)]
        self._swapped = [*self._weights, *slots]  # hold one learner's values at a time
        # Traced, because an eager step runs several ops for each variable.
        self._get = traced(functools.partial(read, self._swapped))
        self._set = traced(functools.partial(assign, self._swapped))
        self._whole = traced(self._whole_gradients)
        self._local: list[list[tf.Tensor]] = []
        self._start: list[tf.Tensor] = []
        self._has_begun = False
        self._position = self._length = 0  # in a cycle, in which each fragment is exchanged once
        self._steps = 0  # of training
        self._finite = True

    @property
    def in_warmup(self) -> bool:
        """Whether the next step is synchronous."""
        return self._exchange.exchanges < self._settings.warmup_steps

    def step(
        self,
        learner: int,
        gradients: Callable[[], tuple[tf.Tensor, list[Any]]],
        take: Callable[[list[Any]], None],
    ) -> tf.Tensor:
        """Takes a learner's local step; the learners come in order. Returns its loss.

        Args:
            learner: The learner's index.
            gradients: Returns the loss and the learner's share of the gradients, by the model.
            take: Has the inner optimizer apply gradients.
        """
        if learner == 0:
            self._finite = True
            self._take_changes()
            self._begin()
        self._set(self._local[learner])
        loss, shares = gradients()
        local, finite = self._whole(shares)
        if has_gradients_left(self._exchange, learner, tf.constant(self._has_begun)):
            pairs = [(g, v) for g, v in zip(local, self._variables, strict=True) if g is not None]
            grads, variables = zip(*pairs, strict=True)
            # Residuals that synchronous steps left go into the learner's first local step.
            take(self._with_residuals(learner, grads, variables, finite))
        elif finite:
            take(local)
        if not self._has_begun:
            forget_earlier_gradients(self._exchange, learner)
        self._finite = self._finite and bool(finite)
        self._local[learner] = self._get()
        return loss

    def _whole_gradients(self, shares: Sequence[Any]) -> tuple[list[Any], tf.Tensor]:
        """Returns whole gradients, and whether they are finite.

        The loss was divided by the number of learners; a local step needs the whole gradient.
        """
        local = [None if share is None else times(share, self._size) for share in shares]
        return local, all_finite([gradient for gradient in local if gradient is not None])

    def _take_changes(self) -> None:
        """Gives all learners what the program has set in the model since the last step."""
        if not self._local:
            return
        for index, value in enumerate(self._get()):
            if not np.array_equal(value, self._local[0][index], equal_nan=True):
                for local in self._local:
                    local[index] = value

    def _begin(self) -> None:
        fresh = set(range(len(self._fragments))) - self._begun_fragments
        if fresh:
            common = self._get()
            self._local = self._local or [common] * self._size
            self._start = self._start or common[: len(self._weights)]
            for index in itertools.chain.from_iterable(self._fragments[i] for i in fresh):
                self._start[index] = common[index]
            self._begun_fragments |= fresh
        if not self._has_begun:
            self._steps = self._exchange.exchanges
        if self._position == 0:
            steps = tf.constant(self._steps, tf.int64)
            self._length = int(length_at(self._settings.steps, steps))

    def _with_residuals(
        self, learner: int, grads: Sequence[Any], variables: Sequence[Any], finite: tf.Tensor
    ) -> list[Any]:
        """Adds the residuals of earlier synchronous steps to a learner's gradients."""
        every = gradients_for_residuals(grads, variables, self._variables, finite)
        return take_residuals(self._exchange.replica(learner), every, self._size)

    def advance(self, reduce: Reduce, *, end_all: bool) -> tuple[bool, StepResult | None]:
        """Ends the step of all learners, and the rounds that are complete.

        Args:
            reduce: Exchanges the learners' pseudo-gradients: None for variables of other fragments.
            end_all: Whether all rounds end now.

        Returns:
            Whether the gradients of all learners were finite, and the result of an exchange, if
            any.
        """
        self._has_begun = True
        self._position += 1
        self._steps += 1
        self._set(self._local[0])
        count_skip(self._exchange.skipped_steps, tf.constant(self._finite))
        count, now = len(self._fragments), self._position
        due = [i for i in range(count) if due_after(i, count, self._length) == now]
        self._position %= self._length
        ended = [self._end(fragment, reduce) for fragment in due]
        if end_all:
            ended += self.end_all(reduce)
        return self._finite, _merged(ended) if ended else None

    def end_all(self, reduce: Reduce) -> list[StepResult]:
        """Ends all rounds that have begun; `reduce` is as for `advance`."""
        self._position = 0
        return [self._end(fragment, reduce) for fragment in sorted(self._begun_fragments)]

    def _end(self, fragment: int, reduce: Reduce) -> StepResult:
        indices, count = self._fragments[fragment], len(self._weights)
        start = [self._start[index] for index in indices]
        start_vector, shares = flatten(start), []
        for learner, local in enumerate(self._local):
            moved = start_vector - flatten([local[index] for index in indices])
            share, counts = local_share(moved, self._size)
            by_index = dict(zip(indices, unflatten(share, start), strict=True))
            shares.append([by_index.get(index) for index in range(count)])
            if not counts:
                self._local[learner] = [*local[:count], *map(finite_or_zero, local[count:])]
        for learner in range(self._size):
            residuals = self._exchange.replica(learner).state().get(RESIDUAL)
            decay([residuals[i] for i in indices] if residuals else [], self._settings)
        weights = [self._weights[index] for index in indices]
        assign(weights, start)
        reduced = reduce(shares)
        if reduced.finite:
            self._update(fragment, [reduced.gradients[index] for index in indices])
        common = dict(zip(indices, read(weights), strict=True))
        self._local = [
            [common.get(index, value) for index, value in enumerate(local)] for local in self._local
        ]
        self._set(self._local[0])
        self._begun_fragments.remove(fragment)
        return reduced

    def _update(self, fragment: int, means: Sequence[Any]) -> None:
        outer, indices = self._settings.outer, self._fragments[fragment]
        if outer is None:
            for index, mean in zip(indices, means, strict=True):
                self._weights[index].assign_sub(mean)
            return
        # As in `Rounds`, because each fragment has its own number of updates.
        total = int(outer.iterations)
        if max(self._updates) != total:
            self._updates = [total] * len(self._updates)
        outer.iterations.assign(self._updates[fragment])
        outer.apply_gradients(list(zip(means, [self._variables[i] for i in indices], strict=True)))
        self._updates[fragment] += 1
        outer.iterations.assign(max(self._updates))


def _merged(results: Sequence[StepResult]) -> StepResult:
    """Merges the results of several exchanges of different variables."""
    gradients = [
        next((gradient for gradient in same_variable if gradient is not None), None)
        for same_variable in zip(*(result.gradients for result in results), strict=True)
    ]
    sent = [
        functools.reduce(Sent.plus, same_learner, Sent.nothing())
        for same_learner in zip(*(result.sent for result in results), strict=True)
    ]
    finite = tf.reduce_all([result.finite for result in results])
    return StepResult(gradients, finite, sent)


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Traces a function, with AutoGraph as in `fit`: Keras 3 converts nothing, which saves time."""
    return tf.function(function, autograph=IS_KERAS_2, reduce_retracing=True)


def read(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """Returns the values of variables."""
    return [variable.read_value() for variable in variables]


class LearnersMoments:
    """Moves second moments to the learners for training, and to the optimizer afterwards.

    The exchange itself gives learners their first shares. Learners keep their shares, and residuals
    stay divided, while the optimizer has the sum. A second `fit` therefore continues the first.

    Args:
        model: Compiled with a plain optimizer.
        exchange: The exchange of the learners.
    """

    def __init__(self, model: keras.Model, exchange: GradientExchange) -> None:
        self._model = model
        self._optimizer = model.optimizer
        self._exchange = exchange
        self._in_optimizer: set[int] = set()  # the gradients whose second moments the optimizer has

    def inner_state(self, variables: Sequence[Any]) -> InnerState | None:
        """Returns the optimizer's state of some variables; None if no gradient is divided."""
        if self._exchange.setup.preconditioner is None:
            return None
        return inner_state(self._optimizer, variables, lambda variable: variable)

    def to_optimizer(self) -> None:
        """Gives the optimizer the sums of the learners' second moments."""
        hand_over = self._hand_over()
        if hand_over:
            taken = self._copies(self._exchange.facts.moments_taken)[0].numpy().nonzero()[0]
            for index in set(taken) - self._in_optimizer:
                hand_over.to_inner(index, tf.constant(True))
            self._in_optimizer = set(taken)

    def to_learners(self) -> None:
        """Gives the learners their shares of the optimizer's current second moments."""
        hand_over = self._hand_over() if self._in_optimizer else None
        if hand_over:
            for index in self._in_optimizer:
                since = hand_over.to_replicas(index, tf.constant(True))
                for local in self._copies(self._exchange.facts.moments_since):
                    local[index].assign(since)
            self._in_optimizer = set()

    def _hand_over(self) -> HandOver | None:
        exchange, inner = self._exchange, self.inner_state(self._model.trainable_variables)
        if exchange.setup.preconditioner is None or inner is None:
            return None
        shapes = [spec.shape for spec in exchange.specs]
        return HandOver(
            exchange.setup.preconditioner,
            inner,
            [exchange.replica(learner).state() for learner in range(exchange.group.size)],
            gradient_state=[],
            waiting=[tf.zeros(shape) for shape in shapes],  # second moments have seen residuals
            lost=tf.zeros([len(shapes)], tf.bool),
            since=self._copies(exchange.facts.moments_since)[0].read_value(),
            replicas=exchange.group.size,
        )

    def _copies(self, fact: tf.Variable) -> list[tf.Variable]:
        """Returns each learner's copy of a fact."""
        learners = range(self._exchange.group.size)
        return [self._exchange.replica(learner).local(fact) for learner in learners]
