"""Hands second moments over, from a model's optimizer to its learners and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp.adam.handover import InnerState, updates_after
from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.exchange.state import State


@dataclasses.dataclass(frozen=True)
class SharedMoments:
    """Second moments, which learners keep while they train, and the optimizer keeps otherwise.

    By `HandOver` each replica begins with an equal share. Learners that go on after a `fit` have
    the shares that they had, and their residuals, which nobody else sends, stay divided.

    Attributes:
        preconditioner: What divides the learners' gradients.
        inner: The optimizer's state, for all gradients.
        states: What each learner keeps.
        since: int64 [gradients] of each learner, as of `HandOver`; updated in place.
    """

    preconditioner: Preconditioner
    inner: InnerState
    states: Sequence[State]
    since: Sequence[tf.Variable]

    def take(self, place: int) -> None:
        """Gives each learner its share of the second moments of one gradient.

        The optimizer's momentum is divided by their root.
        """
        totals = {
            name: tf.cast(slots[place].read_value(), tf.float32)
            for name, slots in self.inner.moments.items()
        }
        for name, total in totals.items():
            before = self._sum(name, place)
            for state in self.states:
                own = state[name][place]
                own.assign(total * tf.where(before > 0, own / before, 1 / len(self.states)))
        second_moment = totals[self.preconditioner.root_of]
        correction = self.preconditioner.correction(self.inner.updates)
        (divided,) = correction.divided([self._momentum(place)], second_moment)
        _assign(self.inner.momentums[place], divided)
        for since in self.since:
            since[place].assign(self.inner.updates_before(second_moment))

    def give_back(self, place: int) -> None:
        """Gives the optimizer the sum of the learners' second moments; the inverse of `take`."""
        second_moment = self._sum(self.preconditioner.root_of, place)
        updates = updates_after(self.inner.updates, self.since[0][place])
        own, inner = map(self.preconditioner.correction, (updates, self.inner.updates))
        _assign(self.inner.momentums[place], self._momentum(place) * own.root(second_moment))
        for name, slots in self.inner.moments.items():
            _assign(slots[place], self._sum(name, place) * tf.square(inner.factor / own.factor))

    def _sum(self, name: str, place: int) -> tf.Tensor:
        return tf.add_n([state[name][place].read_value() for state in self.states])

    def _momentum(self, place: int) -> tf.Tensor:
        return tf.cast(self.inner.momentums[place].read_value(), tf.float32)


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    variable.assign(tf.cast(value, variable.dtype))
