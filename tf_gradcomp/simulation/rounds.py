"""Local steps of learners in one process: each has weights and an inner optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.gradients import all_finite, native, times
from tf_gradcomp.exchange.step import StepResult, count_skip
from tf_gradcomp.groups.group import Member
from tf_gradcomp.keras.common.local_steps import LocalSteps
from tf_gradcomp.keras.common.pseudo_gradients import (
    beside_residuals,
    decay,
    finite_or_zero,
    has_gradients_left,
    local_share,
)
from tf_gradcomp.keras.common.residual_units import forget_earlier_gradients
from tf_gradcomp.keras.common.round_lengths import length_at
from tf_gradcomp.keras.common.version import keras, keras_module

keras_private = keras_module("keras_private")


class LearnersRounds:
    """Does for learners in one process what `Rounds` does for a worker.

    The model takes the weights and the optimizer's state of one learner after another. Between two
    steps it has those of the first learner, and between two rounds the common weights.

    Args:
        model: Compiled with a plain optimizer, which is built.
        settings: The settings.
        exchange: The exchange of the learners.

    Attributes:
        position: How many steps of the round are done.
    """

    def __init__(
        self, model: keras.Model, settings: LocalSteps, exchange: GradientExchange
    ) -> None:
        self.position = 0
        self._settings, self._exchange = settings, exchange
        self._size = exchange.group.size
        self._variables = model.trainable_variables
        self._weights = [native(variable) for variable in self._variables]
        slots = [native(variable) for variable in keras_private.own_variables(model.optimizer)]
        self._swapped = [*self._weights, *slots]
        self._each: list[list[tf.Tensor]] = []
        self._start: list[tf.Tensor] = []
        self._has_begun = False
        self._length = 0
        self._steps = 0  # of training
        self._finite = True

    @property
    def warms_up(self) -> bool:
        """Returns whether the next step is synchronous."""
        return self._exchange.exchanges < self._settings.warmup_steps

    def step(
        self,
        learner: int,
        gradients: Callable[[], tuple[tf.Tensor, list[Any]]],
        take: Callable[[list[Any]], None],
    ) -> tf.Tensor:
        """Takes a learner's local step; the learners come in order. Returns its loss.

        Args:
            learner: The learner's number.
            gradients: Returns the loss and the learner's share of the gradients, by the model.
            take: Has the inner optimizer apply gradients.
        """
        if learner == 0:
            self._finite = True
            if self.position == 0:
                self._begin()
        _assign(self._swapped, self._each[learner])
        loss, own = gradients()
        pairs = zip(own, self._variables, strict=True)
        given = [(times(one, self._size), v) for one, v in pairs if one is not None]
        finite = all_finite([gradient for gradient, _ in given])
        if has_gradients_left(self._exchange, learner, tf.constant(self._has_begun)):
            grads, variables = zip(*given, strict=True)
            take(self._with_residuals(learner, grads, variables, finite))
        elif finite:
            take([None if one is None else times(one, self._size) for one in own])
        if not self._has_begun:
            forget_earlier_gradients(self._exchange, learner)
        self._finite = self._finite and bool(finite)
        self._each[learner] = _read(self._swapped)
        return loss

    def _begin(self) -> None:
        common = _read(self._swapped)
        self._start = common[: len(self._weights)]
        if not self._has_begun:
            self._steps = self._exchange.exchanges
        self._length = int(length_at(self._settings.steps, tf.constant(self._steps, tf.int64)))
        if not self._each:
            self._each = [common] * self._size

    def _with_residuals(
        self, learner: int, grads: Sequence[Any], variables: Sequence[Any], finite: tf.Tensor
    ) -> list[Any]:
        """Adds what synchronous steps have left in a learner's residuals."""
        member = Member(self._exchange.group.communicators()[learner], learner)
        every = beside_residuals(grads, variables, self._variables, finite)
        return self._exchange.take_residuals(every, self._variables, self._size, member=member)

    def advance(self) -> tuple[bool, bool]:
        """Ends the step of all learners.

        Returns:
            Whether the gradients of all learners were finite, and whether the round ends now.
        """
        self._has_begun = True
        self.position += 1
        self._steps += 1
        _assign(self._swapped, self._each[0])
        count_skip(self._exchange.skipped_steps, tf.constant(self._finite))
        return self._finite, self.position >= self._length

    def end(self, reduce: Callable[[list[list[Any]]], StepResult]) -> StepResult:
        """Ends the round.

        Args:
            reduce: Exchanges the learners' pseudo-gradients.
        """
        count = len(self._weights)
        shares = []
        for learner, own in enumerate(self._each):
            share, counts = local_share(self._start, own[:count], self._size)
            shares.append(share)
            if not counts:
                self._each[learner] = [*own[:count], *map(finite_or_zero, own[count:])]
        for learner in range(self._size):
            own = [self._exchange.group.local(one, learner) for one in self._exchange.residuals]
            decay(own, self._settings)
        _assign(self._weights, self._start)
        reduced = reduce(shares)
        if reduced.finite:
            self._update(reduced.gradients)
        common = _read(self._weights)
        self._each = [[*common, *own[count:]] for own in self._each]
        self.position = 0
        return reduced

    def _update(self, means: Sequence[Any]) -> None:
        outer = self._settings.outer
        if outer is not None:
            outer.apply_gradients(list(zip(means, self._variables, strict=True)))
            return
        for weight, mean in zip(self._weights, means, strict=True):
            weight.assign_sub(mean)


def _read(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return [variable.read_value() for variable in variables]


def _assign(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
