"""Workers that gossip, in one process and without training: what tests of gossip share."""

import numpy as np
import tensorflow as tf

from tf_gradcomp.keras.common.gossip_messages import _SEED, Messages


def fresh(size):
    """Returns the numbers that an implementation draws in place of factors that are zero."""

    def drawn(edge, time, length):
        seed = [_SEED + edge[0] * size + edge[1], time]
        return np.float64(tf.random.stateless_normal([length], seed, alg="philox"))

    return drawn


class Workers:
    """Workers with weights, and rounds of gossip by the code of the package."""

    def __init__(self, settings, values, *, graph=False):
        size = len(values)
        shapes = [value.shape for value in values[0]]
        self.messages = [Messages(settings, shapes, size, rank) for rank in range(size)]
        self.values = [[tf.Variable(value) for value in own] for own in values]
        self.kept = {
            rows: [tf.Variable(tf.zeros([m.edges, m.kept[not rows]])) for m in self.messages]
            for rows in (True, False)
        }
        self.time = 0
        # Tracing takes as long as a hundred rounds.
        self._round = tf.function(self._round_of, autograph=False) if graph else self._round_of

    def rounds(self, number):
        for _ in range(number):
            self.time += 1
            rows = self.messages[0].whole or self.time % 2 == 1
            self._round(tf.constant(self.time), rows)
        return self

    def _round_of(self, time, rows):
        spoken = [
            one.speak(own, kept.read_value(), time, rows=rows)
            for one, own, kept in zip(self.messages, self.values, self.kept[not rows], strict=True)
        ]
        heard = [one.hear(*args, rows=rows) for one, *args in self._meetings(spoken, time)]
        for own, kept, (moves, factors) in zip(self.values, self.kept[rows], heard, strict=True):
            for value, move in zip(own, moves, strict=True):
                value.assign_add(move)
            if kept.shape[1]:
                kept.assign(factors)

    def _meetings(self, spoken, time):
        for rank, one in enumerate(self.messages):
            partners = [int(tf.get_static_value(p)) for p in one.partners(time)]
            edges = [
                self.messages[partner].matchings.index(matching)
                for partner, matching in zip(partners, one.matchings, strict=True)
            ]
            heard = [spoken[p].messages[edge] for p, edge in zip(partners, edges, strict=True)]
            yield one, spoken[rank], heard

    @property
    def means(self):
        """Returns the mean of each weight."""
        return [np.mean(np.float64(of_all), 0) for of_all in zip(*self.values, strict=True)]

    @property
    def errors(self):
        """Returns the sum of squared distances from the mean, of each weight."""
        return np.array(
            [
                np.sum((np.float64(of_all) - mean) ** 2)
                for of_all, mean in zip(zip(*self.values, strict=True), self.means, strict=True)
            ]
        )
