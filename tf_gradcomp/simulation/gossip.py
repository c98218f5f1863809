"""Gossip of learners in one process."""

from __future__ import annotations

import tensorflow as tf

from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.gradients import all_finite, native
from tf_gradcomp.exchange.state import assign
from tf_gradcomp.exchange.step import StepResult
from tf_gradcomp.groups.communicator import Sent, dense_ring_bytes
from tf_gradcomp.keras.common.gossip import Gossip
from tf_gradcomp.keras.common.gossip_messages import Messages
from tf_gradcomp.keras.common.local_steps import LocalSteps
from tf_gradcomp.keras.common.pseudo_gradients import finite_or_zero
from tf_gradcomp.keras.common.version import keras
from tf_gradcomp.simulation.rounds import LearnersRounds, Reduce, read


class LearnersGossip(LearnersRounds):
    """Takes learners in one process through gossip, as `GossipRounds` does for a worker.

    Between two steps, the model has the weights of the first learner. After an early end, all
    learners have the mean of their weights. Takes the arguments of `LearnersRounds`.
    """

    def __init__(self, model: keras.Model, settings: Gossip, exchange: GradientExchange) -> None:
        super().__init__(model, settings, exchange)
        if settings.outer is not None:
            self._swapped += [native(variable) for variable in settings.outer.variables]
        shapes = [weight.shape for weight in self._weights]
        learners = range(self._size)
        self._messages = [Messages(settings, shapes, self._size, rank) for rank in learners]
        self._starts: list[list[tf.Tensor]] = []
        self._round_number = 0
        # The factors of rows, and the factors of columns, of each learner.
        self._factors = {
            rows: [tf.zeros([one.edges, one.factor_sizes[not rows]]) for one in self._messages]
            for rows in (True, False)
        }
        self._mix = tf.function(self._mixed, autograph=False)

    def _begin(self) -> None:
        fresh = not self._begun
        super()._begin()
        if fresh:
            self._starts = [list(self._start)] * self._size

    def _end(self, number: int, reduce: Reduce) -> StepResult:
        own = [self._finite_weights(learner) for learner in range(self._size)]
        self._round_number += 1
        rows = self._messages[0].uncompressed or self._round_number % 2 == 1
        moves, factors, sent = self._mix(
            own, self._factors[not rows], tf.constant(self._round_number), rows
        )
        if self._messages[0].factor_sizes[0]:
            self._factors[rows] = factors
        for learner, (weights, of_one) in enumerate(zip(own, moves, strict=True)):
            near = [a + tf.cast(b, a.dtype) for a, b in zip(weights, of_one, strict=True)]
            self._move(learner, near)
        return self._counted(sent)

    def _finite_weights(self, learner: int) -> list[tf.Tensor]:
        """Returns a learner's weights; its weights at the start of the round if not finite."""
        count = len(self._weights)
        weights, slots = self._each[learner][:count], self._each[learner][count:]
        if all_finite(weights):
            return weights
        self._each[learner] = [*self._starts[learner], *map(finite_or_zero, slots)]
        return self._starts[learner]

    def _mixed(
        self, own: list[list[tf.Tensor]], kept: list[tf.Tensor], round_number: tf.Tensor, rows: bool
    ) -> tuple[list[list[tf.Tensor]], list[tf.Tensor], list[Sent]]:
        """Returns the moves of each learner's weights, its factors, and the bytes that it sends."""
        partners = [one.partners(round_number) for one in self._messages]
        outgoing = [
            one.outgoing(weights, factors, round_number, rows=rows)
            for one, weights, factors in zip(self._messages, own, kept, strict=True)
        ]

        def received(learner: int, edge: int) -> tf.Tensor:
            matching, partner = self._messages[learner].matchings[edge], partners[learner][edge]
            rank = tf.get_static_value(partner)
            if rank is None:  # the partner is drawn in the graph
                return tf.stack([one.messages[edge] for one in outgoing])[partner]
            return outgoing[rank].messages[self._messages[rank].matchings.index(matching)]

        results = [
            one.corrections(
                outgoing[learner], [received(learner, e) for e in range(one.edges)], rows=rows
            )
            for learner, one in enumerate(self._messages)
        ]
        sent = [
            one.sent(of_one, rows=rows)[0]
            for one, of_one in zip(self._messages, partners, strict=True)
        ]
        return [moves for moves, _ in results], [factors for _, factors in results], sent

    def _move(self, learner: int, near: list[tf.Tensor]) -> None:
        """Gives a learner its corrected weights, or has the outer optimizer compute its weights."""
        outer, count = self._settings.outer, len(self._weights)
        if outer is None:
            self._each[learner] = [*near, *self._each[learner][count:]]
        else:
            start = self._starts[learner]
            assign(self._swapped, [*start, *self._each[learner][count:]])
            moved = [before - now for before, now in zip(start, near, strict=True)]
            outer.apply_gradients(list(zip(moved, self._variables, strict=True)))
            self._each[learner] = read(self._swapped)
        self._starts[learner] = self._each[learner][:count]

    def _counted(self, sent: list[Sent]) -> StepResult:
        """Gives the model the first learner's state, and returns the result of an exchange."""
        assign(self._swapped, self._each[0])
        self._exchange.step.assign_add(1)
        return StepResult([None] * len(self._weights), tf.constant(True), sent)

    def end_all(self, reduce: Reduce) -> list[StepResult]:
        """Gives all learners the mean of their weights, unless their weights are equal."""
        self._position = 0
        if not self._begun:
            return []
        own = [self._finite_weights(learner) for learner in range(self._size)]
        means = [tf.add_n(of_all) / self._size for of_all in zip(*own, strict=True)]
        count = len(self._weights)
        self._each = [[*means, *of_one[count:]] for of_one in self._each]
        self._begun.clear()
        given = sum(4 * int(tf.size(one)) for one in means)
        of_ring = int(dense_ring_bytes(self._size, given))
        return [self._counted([Sent(*tf.constant([given, of_ring], tf.int64))] * self._size)]


def learners_rounds(
    model: keras.Model, settings: LocalSteps, exchange: GradientExchange
) -> LearnersRounds:
    """Returns the rounds of learners with these settings."""
    if isinstance(settings, Gossip):
        return LearnersGossip(model, settings, exchange)
    return LearnersRounds(model, settings, exchange)
