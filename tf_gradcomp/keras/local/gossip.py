"""Gossip: workers average weights only with their neighbours, by low-rank messages.

The arithmetic of gossip: the messages between neighbours, and the corrections of their weights.

Two neighbours multiply their matrices by the same orthonormal basis Q, and send each other the
products. The difference of the products is the product with D, the difference of the matrices. Each
neighbour is corrected by a share of the projection of D: D Q Q^T if Q is a basis for rows, and
Q Q^T D if Q is a basis for columns. The next round uses the product as its basis, for the other
side of the matrix. The rounds thus are a power iteration on a difference that changes slowly.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.compressors.auto import BASELINE, DEFAULT
from tf_gradcomp.compressors.settings import is_whole_number
from tf_gradcomp.exchange.exchange import GradientExchange, check_not_in_xla
from tf_gradcomp.exchange.gradients import all_finite, native
from tf_gradcomp.exchange.replica import count_exchange
from tf_gradcomp.exchange.state import assign, local_variable, shared_variable
from tf_gradcomp.exchange.step import count_skip
from tf_gradcomp.groups.communicator import Sent, dense_ring_bytes
from tf_gradcomp.groups.means import PeriodicReduce
from tf_gradcomp.groups.messages import log_info
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras.local.fragments import Fragment, flatten, unflatten
from tf_gradcomp.keras.local.local_steps import LocalSteps, Schedule
from tf_gradcomp.keras.local.rounds import (
    LocalOptimizer,
    ResidualUnits,
    Rounds,
    drift,
    refuse_weights,
)
from tf_gradcomp.private import tensorflow as tf_private

RING = "ring"


class Gossip(LocalSteps):
    """Settings of gossip, for `CompressedOptimizer(local_steps=...)`.

    Each worker has its own weights. After every `steps` steps, its weights move towards the weights
    of its neighbours in a graph; no exchange involves all workers. Neighbours send each other
    products of their weights with a vector that both know. These products show the most important
    part of the difference between their weights. Evaluation, saving and the end of an epoch use the
    mean of all workers' weights. docs/gossip.md explains when gossip pays.

    Args:
        graph: `"ring"`, in which a worker's neighbours are the workers before and after it.
        rank: The rank of the matrices by which neighbours move towards each other. None sends all
            weights uncompressed. Vectors, and matrices with at most `rank` rows or columns, are
            always sent uncompressed.
        steps: The number of steps between two exchanges, or a schedule: see `gc.LocalSteps`.
        outer: A Keras optimizer that updates a worker's weights at the end of a round, its config
            or its name. Its gradient is the change of the weights by the local steps and the
            neighbours.
        warmup_steps: The number of synchronous first steps. The compressor exchanges gradients in
            these steps only.
        diffusion: How far neighbours move. With 1, a worker and its neighbours have equal shares
            in the worker's mean. Slightly larger numbers make weights agree fastest.

    Raises:
        TypeError: If `outer` is not an optimizer.
        ValueError: If the graph is unknown, a number is out of its range, or `outer` cannot be an
            outer optimizer.

    Reference:
        Vogels et al., "PowerGossip: Practical Low-Rank Communication Compression in Decentralized
        Deep Learning", NeurIPS 2020, https://arxiv.org/abs/2008.01425
    """

    def __init__(
        self,
        graph: str = RING,
        rank: int | None = 1,
        steps: Schedule = 1,
        outer: Any = None,
        warmup_steps: int = 0,
        diffusion: float = 1.0,
    ) -> None:
        if graph != RING:
            raise ValueError(f"Gossip: expected {RING!r} as graph; received {graph!r}.")
        if rank is not None and not is_whole_number(rank, 1, 2**31):
            raise ValueError(
                f"Gossip: expected a whole number as rank, at least 1, or None; received {rank!r}."
            )
        if not 0 < diffusion < 2:
            raise ValueError(
                f"Gossip: expected a diffusion above 0 and below 2; received {diffusion!r}."
            )
        super().__init__(steps, outer, warmup_steps)
        self.graph = graph
        self.rank = None if rank is None else int(rank)
        self.diffusion = float(diffusion)

    def get_config(self) -> dict[str, Any]:
        """Returns the config, for `settings_of`."""
        local_config = super().get_config()
        return {
            "graph": self.graph,
            "rank": self.rank,
            "diffusion": self.diffusion,
            **{name: local_config[name] for name in ("steps", "outer", "warmup_steps")},
        }

    def share(self, size: int) -> float:
        """Returns the share of a neighbour in a worker's mean.

        Raises:
            ValueError: If the neighbours' shares leave nothing for the worker's own weights, so
                that training would diverge.
        """
        neighbours = min(2, size - 1)  # in a ring: two workers have one each
        share = self.diffusion / (neighbours + 1)
        if share * neighbours >= 1:
            raise ValueError(
                f"Gossip: with diffusion={self.diffusion} and {neighbours} neighbours, a worker "
                "has no share in its own mean; expected a diffusion below "
                f"{(neighbours + 1) / neighbours}."
            )
        return share


def settings_of(local_steps: Any) -> LocalSteps | None:
    """Returns the settings of local steps, or of gossip, from the argument `local_steps`.

    Raises:
        ValueError: If the argument is invalid.
    """
    if isinstance(local_steps, Mapping) and "graph" in local_steps:
        return Gossip(**local_steps)
    return LocalSteps.of(local_steps)


def uses_compressor(settings: LocalSteps | None) -> bool:
    """Whether a compressor is used: with gossip, only in the steps of a warm-up."""
    return not isinstance(settings, Gossip) or settings.warmup_steps > 0


def method_for_gradients(settings: LocalSteps | None, method: Any) -> Any:
    """Returns the method that exchanges gradients; with gossip, only a warm-up does so.

    Raises:
        ValueError: If the method would never be used.
    """
    if uses_compressor(settings):
        return method
    if compressors.text_of(method) not in (DEFAULT, BASELINE):
        raise ValueError(
            f"CompressedOptimizer: gossip has its own compression of weights, and "
            f"{compressors.text_of(method)!r} would exchange nothing. Leave out the compressor, or "
            "pass gc.Gossip(..., warmup_steps=...): it exchanges gradients during the warm-up."
        )
    return compressors.get(BASELINE)


_SEED = 2008_01425
_ZERO = 1e-30  # the largest entry of a column that has no direction


class _Matrix(NamedTuple):
    weight_index: int  # the index of the weight
    rows: int
    columns: int


class Outgoing(NamedTuple):
    """The messages of a worker in a round, and the bases that decode its partners' messages.

    Attributes:
        messages: A float32 vector for each partner.
        bases: For each partner, the bases of the matrices.
        signs: For each partner 1 or -1; the partner has the opposite sign for this worker.
    """

    messages: list[tf.Tensor]
    bases: list[list[tf.Tensor]]
    signs: list[float]


class Messages:
    """Encodes and decodes the messages of one worker, without state.

    Args:
        settings: The settings.
        shapes: The shapes of the weights.
        size: The number of workers.
        rank: This worker's number among the workers.

    Attributes:
        uncompressed: Whether all weights are sent uncompressed.
        partners: The ranks of the neighbours on the ring.
        factor_sizes: The number of float32 elements that a worker stores for each partner: in the
            factors of rows, and in the factors of columns.
    """

    def __init__(
        self, settings: Gossip, shapes: Sequence[Sequence[int]], size: int, rank: int
    ) -> None:
        self._rank, self._size = rank, size
        self._share = settings.share(size)
        self._shapes = [tuple(map(int, shape)) for shape in shapes]
        self._columns = columns = settings.rank or 0
        matrices = [
            _Matrix(index, math.prod(shape[:-1]), shape[-1])
            for index, shape in enumerate(self._shapes)
            if len(shape) > 1
        ]
        self._matrices = [
            matrix for matrix in matrices if 0 < columns < min(matrix.rows, matrix.columns)
        ]
        compressed = {matrix.weight_index for matrix in self._matrices}
        self._uncompressed = [
            index for index in range(len(self._shapes)) if index not in compressed
        ]
        self.uncompressed = not self._matrices
        self.partners = sorted({(rank - 1) % size, (rank + 1) % size})
        self.factor_sizes = tuple(self._length(rows=side) for side in (True, False))

    def outgoing(
        self,
        weights: Sequence[tf.Tensor],
        factors: tf.Tensor,
        round_index: tf.Tensor,
        *,
        rows: bool,
    ) -> Outgoing:
        """Returns the worker's messages in a round.

        Args:
            weights: The worker's weights.
            factors: float32 [partners, elements], the factors of the round before.
            round_index: int32 scalar, equal on all workers.
            rows: Whether this round exchanges factors of rows; otherwise factors of columns.
        """
        bases = [
            self._bases(factors[edge], partner, round_index, rows=not rows)
            for edge, partner in enumerate(self.partners)
        ]
        products = [
            tf.split(
                self._product(matrix, weights[matrix.weight_index], matrix_bases, rows=rows),
                len(bases),
                1,
            )
            for matrix, *matrix_bases in zip(self._matrices, *bases, strict=True)
        ]
        uncompressed = [
            tf.reshape(tf.cast(weights[index], tf.float32), [-1]) for index in self._uncompressed
        ]
        messages = [
            tf.concat(
                [
                    *(tf.reshape(edge_products[edge], [-1]) for edge_products in products),
                    *uncompressed,
                ],
                0,
            )
            for edge in range(len(bases))
        ]
        signs = [1.0 if partner < self._rank else -1.0 for partner in self.partners]
        return Outgoing(messages, bases, signs)

    def corrections(
        self, outgoing: Outgoing, received: Sequence[tf.Tensor], *, rows: bool
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the correction of each weight, in float32, and the factors for the next round.

        Args:
            outgoing: The worker's own messages.
            received: The messages of its partners. A partner changes nothing if its message or the
                worker's message to it is not finite: both see this in the difference.
            rows: As for `outgoing`.
        """
        differences = [_finite(a - b) for a, b in zip(outgoing.messages, received, strict=True)]
        length = self._length(rows=rows)
        moves: dict[int, tf.Tensor] = {}
        factors = [self._factors(difference[:length], rows=rows) for difference in differences]
        for position, matrix in enumerate(self._matrices):
            product = tf.concat([edge_factors[position] for edge_factors in factors], 1)
            basis = tf.concat([edge_bases[position] for edge_bases in outgoing.bases], 1)
            pair = (product, basis) if rows else (basis, product)
            moves[matrix.weight_index] = tf.matmul(*pair, transpose_b=True)
        begin = length
        for index in self._uncompressed:
            end = begin + math.prod(self._shapes[index])
            moves[index] = tf.add_n([difference[begin:end] for difference in differences])
            begin = end
        corrections = [
            tf.reshape(-self._share * moves[index], shape)
            for index, shape in enumerate(self._shapes)
        ]
        signed = zip(differences, outgoing.signs, strict=True)
        return corrections, tf.stack([sign * difference[:length] for difference, sign in signed])

    def sent(self, *, rows: bool) -> tuple[Sent, tf.Tensor]:
        """Returns the bytes that the worker sends in a round, in total and for each weight."""
        sizes = [math.prod(shape) for shape in self._shapes]
        for matrix in self._matrices:
            sizes[matrix.weight_index] = self._columns * (matrix.rows if rows else matrix.columns)
        weight_bytes = 4 * len(self.partners) * tf.constant(sizes, tf.int64)
        # A message begins with its sender.
        total = tf.reduce_sum(weight_bytes) + 4 * len(self.partners)
        return Sent(total, total), weight_bytes

    def _length(self, *, rows: bool) -> int:
        return self._columns * sum(
            matrix.rows if rows else matrix.columns for matrix in self._matrices
        )

    def _factors(self, values: tf.Tensor, *, rows: bool) -> list[tf.Tensor]:
        """Splits a vector into the factors of rows, or of columns, of all matrices."""
        lengths = [matrix.rows if rows else matrix.columns for matrix in self._matrices]
        parts = tf.split(values, [self._columns * length for length in lengths]) if lengths else []
        return [tf.reshape(part, [-1, self._columns]) for part in parts]

    def _bases(
        self, factors: tf.Tensor, partner: int, round_index: tf.Tensor, *, rows: bool
    ) -> list[tf.Tensor]:
        """Returns the orthonormal bases, which are equal on both partners.

        A zero column is replaced by a random direction, so that the rounds find new differences.
        """
        if self.uncompressed:
            return []
        pair = min(partner, self._rank) * self._size + max(partner, self._rank)
        drawn = tf.random.stateless_normal(
            [self._length(rows=rows)], [_SEED + pair, round_index], alg="philox"
        )
        random = self._factors(drawn, rows=rows)
        bases = []
        for factor, random_factor in zip(self._factors(factors, rows=rows), random, strict=True):
            largest = tf.reduce_max(tf.abs(factor), 0, keepdims=True)
            scaled = tf.math.divide_no_nan(factor, largest)  # squares of tiny numbers would vanish
            bases.append(_orthonormal(tf.where(largest < _ZERO, random_factor, scaled)))
        return bases

    def _product(
        self, left_arrays: _Matrix, weight: tf.Tensor, bases: Sequence[tf.Tensor], *, rows: bool
    ) -> tf.Tensor:
        """Returns the products with the bases of all edges, as columns of one matrix.

        The products are computed in float64, because partners subtract products that are much
        larger than their difference, and a GPU may multiply float32 numbers with only ten bits.
        """
        matrix = tf.reshape(tf.cast(weight, tf.float64), [left_arrays.rows, left_arrays.columns])
        basis = tf.cast(tf.concat(bases, 1), tf.float64)
        return tf.cast(tf.matmul(matrix, basis, transpose_a=not rows), tf.float32)


def _orthonormal(factor: tf.Tensor) -> tf.Tensor:
    """Returns an orthonormal basis of a factor's columns, all of them nonzero."""
    if factor.shape[1] == 1:
        return factor / tf.norm(factor)
    with tf.device("CPU:0"):  # a GPU takes a millisecond for each factor
        return tf.linalg.qr(factor).q


def _finite(difference: tf.Tensor) -> tf.Tensor:
    finite = tf.reduce_all(tf.math.is_finite(difference))
    return tf.where(finite, difference, tf.zeros_like(difference))


_FIRST_GROUP_KEY = 4_000_000  # far from the keys of other groups: see `tf_private`
_group_keys = itertools.count(_FIRST_GROUP_KEY)


class Pairs:
    """Exchanges vectors between two workers of a strategy, by a collective with a group of two.

    TensorFlow has no point-to-point messages for a strategy's workers. A worker can be in several
    pairs at the same time.

    Args:
        group: The workers. All workers create objects of this class in the same order.
    """

    def __init__(self, group: StrategyGroup) -> None:
        (communicator,) = group.communicators()
        self.rank, self.size = int(communicator.rank), group.size
        device = tf.DeviceSpec.from_string(group.devices[0])
        # Vectors are short, and NCCL needs all collectives of a GPU in one order.
        self._host = device.replace(device_type="CPU", device_index=0).to_string()
        self._seconds = tf_private.timeout_seconds(group.strategy)
        self._group_key = next(_group_keys)
        for _ in range(self.size**2 - 1):  # one key for each pair
            next(_group_keys)

    def swap(self, values: tf.Tensor, partner: int, key: tf.Tensor) -> tf.Tensor:
        """Returns the partner's vector.

        Args:
            values: float32 vector, as long as the partner's vector.
            partner: The partner's rank. The partner calls this with our rank.
            key: int32 scalar, equal on both partners and different in each call.
        """
        low, high = sorted((partner, self.rank))
        with tf.device(self._host):
            rows = tf.raw_ops.CollectiveGatherV2(
                # TensorFlow sorts the rows by device name, so each begins with its sender's rank.
                input=tf.concat([[tf.cast(self.rank, tf.float32)], values], 0)[tf.newaxis],
                group_size=2,
                group_key=self._group_key + low * self.size + high,
                instance_key=key,
                ordering_token=[],
                timeout_seconds=self._seconds,
            )
            index = tf.cast(tf.equal(rows[0, 0], tf.cast(self.rank, tf.float32)), tf.int32)
            return tf.ensure_shape(rows[index, 1:], values.shape)


_ROUNDS_TO_LOGS = 32  # between two sums of metrics, for which all workers wait


class GossipRounds(Rounds):
    """Rounds that end with an exchange between neighbours; takes the arguments of `Rounds`.

    Each worker has its own weights at the start of a round. `has_begun` is true from the first step
    that makes weights differ until all workers take the mean of their weights.
    """

    def __init__(
        self,
        settings: Gossip,
        exchange: GradientExchange,
        units: ResidualUnits,
        variables: Sequence[Any],
        optimizer: LocalOptimizer,
    ) -> None:
        super().__init__(settings, exchange, units, variables, optimizer)
        unit = native(units.in_weight_units)
        tf_private.save_as(unit, lambda: tf.constant(False), self._restore_unit)
        (fragment,) = self._state.fragments
        shapes = [weight.shape for weight in fragment.weights]
        with tf.init_scope():
            self._pairs = Pairs(self._group)
            self._messages = Messages(settings, shapes, self._pairs.size, self._pairs.rank)
            new = self._group.create(self._new_factors)
        # Checkpoints need no factors, because all weights are equal when a checkpoint is written.
        self._round_index, self._row_factors, self._column_factors = map(self._local, new)
        log_info(_notice(settings, self._pairs.size))
        self.exchanges = PeriodicReduce(self._local(self._exchange.step), _ROUNDS_TO_LOGS)

    def _restore_unit(self, in_weight_units: tf.Tensor) -> None:
        refuse_weights(in_weight_units)
        self.abandon()

    def abandon(self) -> None:
        super().abandon()
        self._in_weight_units.assign(False)  # a residual of gradients may have been restored

    def _new_factors(self) -> list[tf.Variable]:
        messages = self._messages
        factors = [
            local_variable(tf.zeros([len(messages.partners), size]), f"gossip_{side}", True)
            for side, size in zip(("rows", "columns"), messages.factor_sizes, strict=True)
        ]
        return [shared_variable(0, tf.int64, "gossip_rounds"), *factors]

    # The next methods run across replicas, once in each worker.

    def _end(self, fragment: Fragment) -> None:
        check_not_in_xla()
        weights, start = self._finite_weights(fragment)
        moves = self._moves(weights)
        near = [value + tf.cast(m, value.dtype) for value, m in zip(weights, moves, strict=True)]
        if self._settings.outer is None:
            assign(fragment.weights, near)
        else:
            assign(fragment.weights, start)
            moved = [before - now for before, now in zip(start, near, strict=True)]
            self._update_common(tf.distribute.get_strategy(), moved, fragment)
        fragment.take_start()
        self._local(self._state.rounds).assign_add(1)

    def _finite_weights(self, fragment: Fragment) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the worker's weights, and its weights at the start of the round.

        If its weights are not finite, the worker returns to the start of the round.
        """
        weights = [weight.read_value() for weight in fragment.weights]
        start = unflatten(fragment.start.read_value(), weights)
        counts = all_finite(weights)
        count_skip(self._exchange.skipped_steps, counts)
        tf.cond(counts, lambda: None, self._reset_overflowed_slots)
        return [tf.where(counts, a, b) for a, b in zip(weights, start, strict=True)], start

    def _moves(self, weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns how far the neighbours move each weight."""
        with tf.control_dependencies([self._round_index.assign_add(1)]):
            round_index = tf.cast(self._round_index.read_value(), tf.int32)
        by = functools.partial(self._moves_by, weights, round_index)
        if self._messages.uncompressed:
            return by(rows=True)
        return tf.cond(tf.equal(round_index % 2, 1), lambda: by(rows=True), lambda: by(rows=False))

    def _moves_by(
        self, weights: Sequence[tf.Tensor], round_index: tf.Tensor, *, rows: bool
    ) -> list[tf.Tensor]:
        messages = self._messages
        earlier, new = (self._column_factors, self._row_factors)[:: 1 if rows else -1]
        outgoing = messages.outgoing(weights, earlier.read_value(), round_index, rows=rows)
        received = [
            self._pairs.swap(message, partner, round_index)
            for message, partner in zip(outgoing.messages, messages.partners, strict=True)
        ]
        moves, factors = messages.corrections(outgoing, received, rows=rows)
        if new.shape[1]:
            new.assign(factors)
        sent, weight_bytes = messages.sent(rows=rows)
        count_exchange(self._exchange.setup, self._indices, sent, weight_bytes)
        return moves

    # The next method runs between two steps, outside of a graph.

    def _end_early(self) -> None:
        """Gives all workers the mean of their weights."""
        (fragment,) = self._state.fragments
        if not fragment.has_begun:
            return
        weights, _ = self._finite_weights(fragment)
        with tf.device("CPU:0"):
            flat = flatten(weights)
            mean = tf_private.sum_over_workers(self._group.strategy, flat) / self._group.size
            fragment.drift.assign(drift(mean - flat, mean))
            means = unflatten(mean, weights)
        assign(fragment.weights, means)
        fragment.steps.assign(0)
        weight_bytes = tf.constant([4 * int(tf.size(weight)) for weight in weights], tf.int64)
        payload_bytes = tf.reduce_sum(weight_bytes)
        sent = tf.constant(int(dense_ring_bytes(self._group.size, int(payload_bytes))), tf.int64)
        count_exchange(self._exchange.setup, self._indices, Sent(payload_bytes, sent), weight_bytes)


def _notice(settings: Gossip, workers: int) -> str:
    sent = "whole weights" if settings.rank is None else f"rank {settings.rank}"
    when = "not exchanged"
    if settings.warmup_steps:
        when = f"exchanged in the first {settings.warmup_steps} steps only"
    return f"{workers} workers gossip: graph {settings.graph!r}, {sent}. Gradients are {when}."


def new_rounds(
    settings: LocalSteps,
    exchange: GradientExchange,
    units: ResidualUnits,
    variables: Sequence[Any],
    optimizer: LocalOptimizer,
) -> Rounds:
    """Returns the rounds of a job with these settings; takes the arguments of `Rounds`."""
    if isinstance(settings, Gossip) and exchange.group.size > 1:
        return GossipRounds(settings, exchange, units, variables, optimizer)
    return Rounds(settings, exchange, units, variables, optimizer)
