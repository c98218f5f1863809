"""Workers that gossip in one process and without training, for the tests of gossip."""

import numpy as np
import tensorflow as tf

from tf_gradcomp.keras.local.gossip import _SEED, Messages


def fresh(size):
    """Returns a function that draws the random numbers which replace zero factors."""

    def drawn(edge, round_index, length):
        seed = [_SEED + edge[0] * size + edge[1], round_index]
        return np.float64(tf.random.stateless_normal([length], seed, alg="philox"))

    return drawn


class Workers:
    """Workers with weights, which take rounds of gossip by the package's code."""

    def __init__(self, settings, values, *, graph=False):
        size = len(values)
        shapes = [value.shape for value in values[0]]
        self.messages = [Messages(settings, shapes, size, rank) for rank in range(size)]
        self.values = [[tf.Variable(value) for value in local] for local in values]
        self.factors = {
            rows: [
                tf.Variable(tf.zeros([len(m.partners), m.factor_sizes[not rows]]))
                for m in self.messages
            ]
            for rows in (True, False)
        }
        self.round_number = 0
        # Tracing takes as long as a hundred rounds.
        self._round = tf.function(self._take_round, autograph=False) if graph else self._take_round

    def rounds(self, number):
        for _ in range(number):
            self.round_number += 1
            rows = self.messages[0].uncompressed or self.round_number % 2 == 1
            self._round(tf.constant(self.round_number), rows)
        return self

    def _take_round(self, round_index, rows):
        outgoing = [
            one.outgoing(local, factors.read_value(), round_index, rows=rows)
            for one, local, factors in zip(
                self.messages, self.values, self.factors[not rows], strict=True
            )
        ]
        received = [one.corrections(*args, rows=rows) for one, *args in self._exchanges(outgoing)]
        for local, stored, (moves, factors) in zip(
            self.values, self.factors[rows], received, strict=True
        ):
            for value, move in zip(local, moves, strict=True):
                value.assign_add(move)
            if factors.shape[1]:
                stored.assign(factors)

    def _exchanges(self, outgoing):
        for rank, message in enumerate(self.messages):
            edges = [self.messages[partner].partners.index(rank) for partner in message.partners]
            pairs = zip(message.partners, edges, strict=True)
            yield message, outgoing[rank], [outgoing[p].messages[edge] for p, edge in pairs]

    @property
    def means(self):
        """Returns the mean of each weight."""
        return [np.mean(np.float64(copies), 0) for copies in zip(*self.values, strict=True)]

    @property
    def errors(self):
        """Returns for each weight the sum of its squared distances from the mean."""
        return np.array(
            [
                np.sum((np.float64(copies) - mean) ** 2)
                for copies, mean in zip(zip(*self.values, strict=True), self.means, strict=True)
            ]
        )
