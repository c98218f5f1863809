"""The arithmetic of gossip: what neighbours send each other, and how far they move then.

Two neighbours know the same basis of some columns, multiply their matrices by it, and send each
other the products. The difference of the products is the product of their difference D. They move
towards each other by its projection, D Q Q^T, or Q Q^T D where Q is a basis of columns. The product
is the next basis, of the other side: a power iteration on a difference that changes slowly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradcomp.groups.communicator import Sent
from tf_gradcomp.keras.common.gossip import Gossip
from tf_gradcomp.keras.common.gossip_graphs import RANDOM_PAIRS, matchings_of

_SEED = 2008_01425
_ZERO = 1e-30  # the largest entry of a column that has no direction


class _Matrix(NamedTuple):
    place: int  # of the weight
    rows: int
    columns: int


class Spoken(NamedTuple):
    """Messages of a worker, and what it needs to understand the answers.

    Attributes:
        messages: A float32 vector for each partner.
        bases: The bases of the matrices, for each partner.
        signs: 1 or -1 for each partner, the other one of these at the partner's side.
    """

    messages: list[tf.Tensor]
    bases: list[list[tf.Tensor]]
    signs: list[tf.Tensor]


class Messages:
    """The messages of one worker, which keeps nothing here.

    Args:
        settings: The settings.
        shapes: The shapes of the weights.
        size: The number of workers.
        rank: This worker's number among them.

    Attributes:
        whole: Whether all weights are sent whole.
        edges: The number of partners in a round.
        matchings: The matching of each edge. Both partners have it in theirs. Random pairs are
            those of one matching, which is another one in each round.
        kept: How many numbers a worker keeps for each side of an edge: the factors of rows, and
            those of columns. No factors are kept where partners change.
    """

    def __init__(
        self, settings: Gossip, shapes: Sequence[Sequence[int]], size: int, rank: int
    ) -> None:
        self._rank, self._size = rank, size
        self._share = settings.share(size)
        self._shapes = [tuple(map(int, shape)) for shape in shapes]
        self._columns = columns = settings.rank or 0
        matrices = [
            _Matrix(place, math.prod(shape[:-1]), shape[-1])
            for place, shape in enumerate(self._shapes)
            if len(shape) > 1
        ]
        self._matrices = [one for one in matrices if 0 < columns < min(one.rows, one.columns)]
        low = {one.place for one in self._matrices}
        self._wholes = [place for place in range(len(self._shapes)) if place not in low]
        self.whole = not self._matrices
        matchings = matchings_of(settings.graph, size)
        self._random = settings.graph == RANDOM_PAIRS
        own = matchings[:, rank]
        active = np.flatnonzero(own != rank)
        self._partners = own if self._random else own[active]
        self.matchings = [0] if self._random else active.tolist()
        self.edges = len(self.matchings)
        self.kept = tuple(0 if self._random else self._length(rows=side) for side in (True, False))

    def partners(self, time: tf.Tensor) -> list[tf.Tensor]:
        """Returns the partner in each of the edges; the worker itself where it rests.

        Args:
            time: int32 scalar, the number of the round, equal on all workers.
        """
        if not self._random:
            return [tf.constant(partner) for partner in self._partners]
        drawn = tf.random.stateless_uniform(
            [], [_SEED, time], 0, len(self._partners), tf.int32, alg="philox"
        )
        return [tf.gather(tf.constant(self._partners), drawn)]

    def speak(
        self, weights: Sequence[tf.Tensor], kept: tf.Tensor, time: tf.Tensor, *, rows: bool
    ) -> Spoken:
        """Returns what the worker sends.

        Args:
            weights: Its weights.
            kept: float32 [edges, numbers], the factors that were received in the round before.
            time: As for `partners`.
            rows: Whether factors of the matrices' rows are sent, or those of columns.
        """
        partners = self.partners(time)
        bases = [
            self._bases(kept[edge], partner, time, rows=not rows)
            for edge, partner in enumerate(partners)
        ]
        products = [
            tf.split(self._product(one, weights[one.place], of_one, rows=rows), self.edges, 1)
            for one, *of_one in zip(self._matrices, *bases, strict=True)
        ]
        wholes = [tf.reshape(tf.cast(weights[place], tf.float32), [-1]) for place in self._wholes]
        messages = [
            tf.concat([*(tf.reshape(of_one[edge], [-1]) for of_one in products), *wholes], 0)
            for edge in range(self.edges)
        ]
        signs = [tf.where(partner < self._rank, 1.0, -1.0) for partner in partners]
        return Spoken(messages, bases, signs)

    def hear(
        self, spoken: Spoken, heard: Sequence[tf.Tensor], *, rows: bool
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns what to add to each weight, in float32, and the factors to keep.

        Args:
            spoken: What the worker has sent.
            heard: The messages of its partners. Nothing is done with a partner where one of both
                has sent what is not finite. Both see this in the difference.
            rows: As for `speak`.
        """
        differences = [_finite(a - b) for a, b in zip(spoken.messages, heard, strict=True)]
        length = self._length(rows=rows)
        moves: dict[int, tf.Tensor] = {}
        factors = [self._factors(one[:length], rows=rows) for one in differences]
        for number, one in enumerate(self._matrices):
            product = tf.concat([of_edge[number] for of_edge in factors], 1)
            basis = tf.concat([of_edge[number] for of_edge in spoken.bases], 1)
            pair = (product, basis) if rows else (basis, product)
            moves[one.place] = tf.matmul(*pair, transpose_b=True)
        begin = length
        for place in self._wholes:
            end = begin + math.prod(self._shapes[place])
            moves[place] = tf.add_n([one[begin:end] for one in differences])
            begin = end
        corrections = [
            tf.reshape(-self._share * moves[place], shape)
            for place, shape in enumerate(self._shapes)
        ]
        signed = zip(differences, spoken.signs, strict=True)
        return corrections, tf.stack([sign * one[:length] for one, sign in signed])

    def sent(self, partners: Sequence[tf.Tensor], *, rows: bool) -> tuple[Sent, tf.Tensor]:
        """Returns the bytes that the worker sends in a round, and those of each weight; int64."""
        numbers = [math.prod(shape) for shape in self._shapes]
        for one in self._matrices:
            numbers[one.place] = self._columns * (one.rows if rows else one.columns)
        awake = [tf.cast(tf.not_equal(one, self._rank), tf.int64) for one in partners]
        each = 4 * tf.add_n(awake) * tf.constant(numbers, tf.int64)
        total = tf.reduce_sum(each) + 4 * tf.add_n(awake)  # a message begins with its sender
        return Sent(total, total), each

    def _length(self, *, rows: bool) -> int:
        return self._columns * sum(one.rows if rows else one.columns for one in self._matrices)

    def _factors(self, numbers: tf.Tensor, *, rows: bool) -> list[tf.Tensor]:
        """Returns the factors of one side of the matrices, of which a vector has the numbers."""
        lengths = [one.rows if rows else one.columns for one in self._matrices]
        parts = tf.split(numbers, [self._columns * length for length in lengths]) if lengths else []
        return [tf.reshape(part, [-1, self._columns]) for part in parts]

    def _bases(
        self, kept: tf.Tensor, partner: tf.Tensor, time: tf.Tensor, *, rows: bool
    ) -> list[tf.Tensor]:
        """Returns orthonormal bases that both partners know.

        A column that is zero gets a random direction: a difference may be new.
        """
        if self.whole:
            return []
        pair = tf.minimum(partner, self._rank) * self._size + tf.maximum(partner, self._rank)
        drawn = tf.random.stateless_normal(
            [self._length(rows=rows)], [_SEED + pair, time], alg="philox"
        )
        fresh = self._factors(drawn, rows=rows)
        if self._random:
            return [_orthonormal(factor) for factor in fresh]
        bases = []
        for factor, other in zip(self._factors(kept, rows=rows), fresh, strict=True):
            largest = tf.reduce_max(tf.abs(factor), 0, keepdims=True)
            # Squares of numbers so small would be zero.
            scaled = tf.math.divide_no_nan(factor, largest)
            bases.append(_orthonormal(tf.where(largest < _ZERO, other, scaled)))
        return bases

    def _product(
        self, one: _Matrix, weight: tf.Tensor, bases: Sequence[tf.Tensor], *, rows: bool
    ) -> tf.Tensor:
        """Returns the products with the bases of all edges, next to each other.

        They are computed in float64, because a GPU multiplies float32 with ten bits. Both partners
        subtract products of weights, which are much larger than their difference.
        """
        matrix = tf.reshape(tf.cast(weight, tf.float64), [one.rows, one.columns])
        basis = tf.cast(tf.concat(bases, 1), tf.float64)
        return tf.cast(tf.matmul(matrix, basis, transpose_a=not rows), tf.float32)


def _orthonormal(factor: tf.Tensor) -> tf.Tensor:
    """Returns an orthonormal basis of a factor's columns, of which none is zero."""
    if factor.shape[1] == 1:
        return factor / tf.norm(factor)
    with tf.device("CPU:0"):  # a GPU takes a millisecond for each
        return tf.linalg.qr(factor).q


def _finite(difference: tf.Tensor) -> tf.Tensor:
    finite = tf.reduce_all(tf.math.is_finite(difference))
    return tf.where(finite, difference, tf.zeros_like(difference))
