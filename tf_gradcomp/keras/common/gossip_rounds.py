"""The rounds of gossip in a job of several workers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.exchange.exchange import GradientExchange, check_not_in_xla
from tf_gradcomp.exchange.gradients import all_finite, native
from tf_gradcomp.exchange.replica import count_exchange
from tf_gradcomp.exchange.state import assign, own_variable, shared_variable
from tf_gradcomp.exchange.step import count_skip
from tf_gradcomp.groups.communicator import Sent, dense_ring_bytes
from tf_gradcomp.groups.means import RareExchanges
from tf_gradcomp.groups.notices import tell_user
from tf_gradcomp.groups.pairs import Pairs
from tf_gradcomp.keras.common.fragments import Fragment
from tf_gradcomp.keras.common.gossip import Gossip
from tf_gradcomp.keras.common.gossip_messages import Messages
from tf_gradcomp.keras.common.local_steps import LocalSteps
from tf_gradcomp.keras.common.pseudo_gradients import drift
from tf_gradcomp.keras.common.residual_units import ResidualUnits, refuse_weights
from tf_gradcomp.keras.common.rounds import Rounds
from tf_gradcomp.private import tensorflow as tf_private

_ROUNDS_TO_LOGS = 32  # between two sums of metrics, for which all workers wait


class GossipRounds(Rounds):
    """Rounds that end with an exchange between neighbours; takes the arguments of `Rounds`.

    Each worker has its own weights at the start of a round. `has_begun` is true from the first step
    that makes weights differ until all workers take the mean of their weights.
    """

    def __init__(
        self, settings: Gossip, exchange: GradientExchange, units: ResidualUnits, *others: Any
    ) -> None:
        super().__init__(settings, exchange, units, *others)
        unit = native(units.of_weights)
        tf_private.save_as(unit, lambda: tf.constant(False), self._restore_unit)
        (fragment,) = self._own.fragments
        shapes = [weight.shape for weight in fragment.weights]
        with tf.init_scope():
            self._pairs = Pairs(self._group)
            self._messages = Messages(settings, shapes, self._pairs.size, self._pairs.rank)
            new = self._group.create(self._new_factors)
        # Checkpoints need no factors, because all weights are equal when a checkpoint is written.
        self._round_number, self._of_rows, self._of_columns = map(self._local, new)
        tell_user(_notice(settings, self._pairs.size))
        self.exchanges = RareExchanges(self._local(self._exchange.step), _ROUNDS_TO_LOGS)

    def _restore_unit(self, of_weights: tf.Tensor) -> None:
        refuse_weights(of_weights)
        self.abandon()

    def abandon(self) -> None:
        super().abandon()
        self._of_weights.assign(False)  # a residual of gradients may have been restored

    def _new_factors(self) -> list[tf.Variable]:
        messages = self._messages
        factors = [
            own_variable(tf.zeros([len(messages.partners), numbers]), f"gossip_{side}", True)
            for side, numbers in zip(("rows", "columns"), messages.factor_sizes, strict=True)
        ]
        return [shared_variable(0, tf.int64, "gossip_rounds"), *factors]

    # The next methods run across replicas, once in each worker.

    def _end(self, fragment: Fragment) -> None:
        check_not_in_xla()
        own, start = self._finite_weights(fragment)
        moves = self._moves(own)
        near = [value + tf.cast(m, value.dtype) for value, m in zip(own, moves, strict=True)]
        if self._settings.outer is None:
            assign(fragment.weights, near)
        else:
            assign(fragment.weights, start)
            moved = [before - now for before, now in zip(start, near, strict=True)]
            self._update_common(tf.distribute.get_strategy(), moved, fragment)
        assign(fragment.start, [weight.read_value() for weight in fragment.weights])
        self._local(self._own.rounds).assign_add(1)

    def _finite_weights(self, fragment: Fragment) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the worker's weights, and its weights at the start of the round.

        If its weights are not finite, the worker returns to the start of the round.
        """
        own = [weight.read_value() for weight in fragment.weights]
        start = [weight.read_value() for weight in fragment.start]
        counts = all_finite(own)
        count_skip(self._exchange.skipped_steps, counts)
        tf.cond(counts, lambda: None, self._reset_overflowed_slots)
        return [tf.where(counts, a, b) for a, b in zip(own, start, strict=True)], start

    def _moves(self, weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns how far the neighbours move each weight."""
        with tf.control_dependencies([self._round_number.assign_add(1)]):
            round_number = tf.cast(self._round_number.read_value(), tf.int32)
        by = functools.partial(self._moves_by, weights, round_number)
        if self._messages.uncompressed:
            return by(rows=True)
        return tf.cond(tf.equal(round_number % 2, 1), lambda: by(rows=True), lambda: by(rows=False))

    def _moves_by(
        self, weights: Sequence[tf.Tensor], round_number: tf.Tensor, *, rows: bool
    ) -> list[tf.Tensor]:
        messages = self._messages
        earlier, new = (self._of_columns, self._of_rows)[:: 1 if rows else -1]
        outgoing = messages.outgoing(weights, earlier.read_value(), round_number, rows=rows)
        received = [
            self._pairs.swap(message, partner, round_number)
            for message, partner in zip(outgoing.messages, messages.partners, strict=True)
        ]
        moves, factors = messages.corrections(outgoing, received, rows=rows)
        if new.shape[1]:
            new.assign(factors)
        sent, each = messages.sent(rows=rows)
        count_exchange(self._exchange.setup, self._places, sent, each)
        return moves

    # The next method runs between two steps, outside of a graph.

    def _end_early(self) -> None:
        """Gives all workers the mean of their weights."""
        (fragment,) = self._own.fragments
        if not fragment.has_begun:
            return
        own, _ = self._finite_weights(fragment)
        with tf.device("CPU:0"):
            flat = tf.concat([tf.reshape(tf.cast(one, tf.float32), [-1]) for one in own], 0)
            mean = tf_private.sum_over_workers(self._group.strategy, flat) / self._group.size
            parts = tf.split(mean, [tf.size(one) for one in own])
            means = [
                tf.cast(tf.reshape(part, one.shape), one.dtype)
                for part, one in zip(parts, own, strict=True)
            ]
        fragment.drift.assign(drift(means, own))
        assign(fragment.weights, means)
        fragment.steps.assign(0)
        each = tf.constant([4 * int(tf.size(one)) for one in own], tf.int64)
        given = tf.reduce_sum(each)
        sent = tf.constant(int(dense_ring_bytes(self._group.size, int(given))), tf.int64)
        count_exchange(self._exchange.setup, self._places, Sent(given, sent), each)


def _notice(settings: Gossip, workers: int) -> str:
    sent = "whole weights" if settings.rank is None else f"rank {settings.rank}"
    when = "not exchanged"
    if settings.warmup_steps:
        when = f"exchanged in the first {settings.warmup_steps} steps only"
    return f"{workers} workers gossip: graph {settings.graph!r}, {sent}. Gradients are {when}."


def new_rounds(
    settings: LocalSteps, exchange: GradientExchange, units: ResidualUnits, *others: Any
) -> Rounds:
    """Returns the rounds of a job with these settings; takes the arguments of `Rounds`."""
    if isinstance(settings, Gossip) and exchange.group.size > 1:
        return GossipRounds(settings, exchange, units, *others)
    return Rounds(settings, exchange, units, *others)
