"""The arithmetic of gossip: the messages between neighbours, and the corrections of their weights.

Two neighbours multiply their matrices by the same orthonormal basis Q, and send each other the
products. The difference of the products is the product with D, the difference of the matrices. Each
neighbour is corrected by a share of the projection of D: D Q Q^T if Q is a basis for rows, and
Q Q^T D if Q is a basis for columns. The next round uses the product as its basis, for the other
side of the matrix. The rounds thus are a power iteration on a difference that changes slowly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_gradcomp.groups.communicator import Sent
from tf_gradcomp.keras.common.gossip import Gossip

_SEED = 2008_01425
_ZERO = 1e-30  # the largest entry of a column that has no direction


class _Matrix(NamedTuple):
    place: int  # the index of the weight
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
            _Matrix(place, math.prod(shape[:-1]), shape[-1])
            for place, shape in enumerate(self._shapes)
            if len(shape) > 1
        ]
        self._matrices = [one for one in matrices if 0 < columns < min(one.rows, one.columns)]
        compressed = {one.place for one in self._matrices}
        self._uncompressed = [
            place for place in range(len(self._shapes)) if place not in compressed
        ]
        self.uncompressed = not self._matrices
        self.partners = sorted({(rank - 1) % size, (rank + 1) % size})
        self.factor_sizes = tuple(self._length(rows=side) for side in (True, False))

    def outgoing(
        self,
        weights: Sequence[tf.Tensor],
        factors: tf.Tensor,
        round_number: tf.Tensor,
        *,
        rows: bool,
    ) -> Outgoing:
        """Returns the worker's messages in a round.

        Args:
            weights: The worker's weights.
            factors: float32 [partners, elements], the factors of the round before.
            round_number: int32 scalar, equal on all workers.
            rows: Whether this round exchanges factors of rows; otherwise factors of columns.
        """
        bases = [
            self._bases(factors[edge], partner, round_number, rows=not rows)
            for edge, partner in enumerate(self.partners)
        ]
        products = [
            tf.split(self._product(one, weights[one.place], of_one, rows=rows), len(bases), 1)
            for one, *of_one in zip(self._matrices, *bases, strict=True)
        ]
        uncompressed = [
            tf.reshape(tf.cast(weights[place], tf.float32), [-1]) for place in self._uncompressed
        ]
        messages = [
            tf.concat([*(tf.reshape(of_one[edge], [-1]) for of_one in products), *uncompressed], 0)
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
        factors = [self._factors(one[:length], rows=rows) for one in differences]
        for number, one in enumerate(self._matrices):
            product = tf.concat([of_edge[number] for of_edge in factors], 1)
            basis = tf.concat([of_edge[number] for of_edge in outgoing.bases], 1)
            pair = (product, basis) if rows else (basis, product)
            moves[one.place] = tf.matmul(*pair, transpose_b=True)
        begin = length
        for place in self._uncompressed:
            end = begin + math.prod(self._shapes[place])
            moves[place] = tf.add_n([one[begin:end] for one in differences])
            begin = end
        corrections = [
            tf.reshape(-self._share * moves[place], shape)
            for place, shape in enumerate(self._shapes)
        ]
        signed = zip(differences, outgoing.signs, strict=True)
        return corrections, tf.stack([sign * one[:length] for one, sign in signed])

    def sent(self, *, rows: bool) -> tuple[Sent, tf.Tensor]:
        """Returns the bytes that the worker sends in a round, in total and for each weight."""
        numbers = [math.prod(shape) for shape in self._shapes]
        for one in self._matrices:
            numbers[one.place] = self._columns * (one.rows if rows else one.columns)
        each = 4 * len(self.partners) * tf.constant(numbers, tf.int64)
        # A message begins with its sender.
        total = tf.reduce_sum(each) + 4 * len(self.partners)
        return Sent(total, total), each

    def _length(self, *, rows: bool) -> int:
        return self._columns * sum(one.rows if rows else one.columns for one in self._matrices)

    def _factors(self, numbers: tf.Tensor, *, rows: bool) -> list[tf.Tensor]:
        """Splits a vector into the factors of rows, or of columns, of all matrices."""
        lengths = [one.rows if rows else one.columns for one in self._matrices]
        parts = tf.split(numbers, [self._columns * length for length in lengths]) if lengths else []
        return [tf.reshape(part, [-1, self._columns]) for part in parts]

    def _bases(
        self, factors: tf.Tensor, partner: int, round_number: tf.Tensor, *, rows: bool
    ) -> list[tf.Tensor]:
        """Returns the orthonormal bases, which are equal on both partners.

        A zero column is replaced by a random direction, so that the rounds find new differences.
        """
        if self.uncompressed:
            return []
        pair = min(partner, self._rank) * self._size + max(partner, self._rank)
        drawn = tf.random.stateless_normal(
            [self._length(rows=rows)], [_SEED + pair, round_number], alg="philox"
        )
        random = self._factors(drawn, rows=rows)
        bases = []
        for factor, other in zip(self._factors(factors, rows=rows), random, strict=True):
            largest = tf.reduce_max(tf.abs(factor), 0, keepdims=True)
            scaled = tf.math.divide_no_nan(factor, largest)  # squares of tiny numbers would vanish
            bases.append(_orthonormal(tf.where(largest < _ZERO, other, scaled)))
        return bases

    def _product(
        self, one: _Matrix, weight: tf.Tensor, bases: Sequence[tf.Tensor], *, rows: bool
    ) -> tf.Tensor:
        """Returns the products with the bases of all edges, as columns of one matrix.

        The products are computed in float64, because partners subtract products that are much
        larger than their difference, and a GPU may multiply float32 numbers with only ten bits.
        """
        matrix = tf.reshape(tf.cast(weight, tf.float64), [one.rows, one.columns])
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
