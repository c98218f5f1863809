"""Moves Adam's second moments between a model's optimizer and its learners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.adam.handover import HandOver, InnerState
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.keras.common.precondition import inner_state
from tf_gradcomp.keras.common.version import keras


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
            taken = self._own(self._exchange.facts.moments_taken)[0].numpy().nonzero()[0]
            for place in set(taken) - self._in_optimizer:
                hand_over.to_inner(place, tf.constant(True))
            self._in_optimizer = set(taken)

    def to_learners(self) -> None:
        """Gives the learners their shares of the optimizer's current second moments."""
        hand_over = self._hand_over() if self._in_optimizer else None
        if hand_over:
            for place in self._in_optimizer:
                since = hand_over.to_replicas(place, tf.constant(True))
                for own in self._own(self._exchange.facts.moments_since):
                    own[place].assign(since)
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
            of_gradients=[],
            waiting=[tf.zeros(shape) for shape in shapes],  # second moments have seen residuals
            lost=tf.zeros([len(shapes)], tf.bool),
            since=self._own(exchange.facts.moments_since)[0].read_value(),
            replicas=exchange.group.size,
        )

    def _own(self, fact: tf.Variable) -> list[tf.Variable]:
        """Returns each learner's own copy of a fact."""
        learners = range(self._exchange.group.size)
        return [self._exchange.replica(learner).local(fact) for learner in learners]
