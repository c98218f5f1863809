"""Rounds whose exchange takes at most a given share of the measured time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_gradcomp.exchange.gradients import native
from tf_gradcomp.exchange.state import own_variable, shared_variable
from tf_gradcomp.exchange.step import StepResult
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras.common.local_steps import LocalSteps

_KEPT = 0.5  # the weight of earlier rounds in a mean, relative to the next round


def choices(at_most: int) -> list[int]:
    """Returns the lengths that a round may have: powers of two, and the longest one."""
    powers = [2**i for i in range(at_most.bit_length())]
    return powers if powers[-1] == at_most else [*powers, at_most]


def vote(
    step: tf.Tensor | float,
    exchange: tf.Tensor | float,
    lengths: Sequence[int],
    exchange_share: float,
) -> tf.Tensor:
    """Returns a worker's vote for the shortest round whose exchange takes a small enough share.

    Args:
        step: float64 scalar, the seconds of a step.
        exchange: float64 scalar, the seconds of an exchange.
        lengths: The lengths to choose from, ascending.
        exchange_share: The largest share of the time that exchanges may take.

    Returns:
        bool [lengths], with exactly one true; the last if no round is long enough.
    """
    of_steps = tf.constant(lengths, tf.float64) * step
    too_short = of_steps * exchange_share < exchange * (1 - exchange_share)
    place = tf.reduce_sum(tf.cast(too_short, tf.int32))
    return tf.equal(tf.range(len(lengths)), tf.minimum(place, len(lengths) - 1))


def elected(votes: tf.Tensor, lengths: Sequence[int], length: tf.Tensor) -> tf.Tensor:
    """Returns the length of the next round, which is at most twice as long as this one.

    The shortest length that any worker voted for is elected. The worker that arrives last at the
    exchange waits for nobody, so only its vote reflects the network.

    Args:
        votes: bool [lengths], which of the lengths have votes.
        lengths: The lengths, ascending.
        length: int64 scalar, the length of this round, which stays if there are no votes.
    """
    shortest = tf.gather(tf.constant(lengths, tf.int64), tf.argmax(tf.cast(votes, tf.int32)))
    return tf.where(tf.reduce_any(votes), tf.minimum(shortest, 2 * length), length)


class RoundTimes:
    """The times that a worker measures, and the length of a round that all workers elect.

    A worker's vote travels with the exchange that ends a round. The vote is based on earlier
    exchanges.

    Args:
        group: The replicas, one in each worker.
        at_most: The length of the longest round.
        exchange_share: The largest share of the time that exchanges may take.
    """

    def __init__(self, group: StrategyGroup, at_most: int, exchange_share: float) -> None:
        self._lengths, self._exchange_share = choices(at_most), exchange_share
        new = group.create(
            lambda: (
                # When the latest step or exchange ended, or 0; then the seconds of steps, their
                # number, the seconds of exchanges and their number.
                own_variable(tf.zeros(5, tf.float64), "times_of_rounds", True),
                shared_variable(1, tf.int64, "steps_of_next_round"),
            )
        )
        self._times, self._length = (group.local(native(variable), 0) for variable in new)

    @classmethod
    def of(cls, settings: LocalSteps, group: StrategyGroup) -> RoundTimes | None:
        """Returns the measurement for "auto"; None if the program sets the lengths of rounds."""
        if settings.at_most is None or settings.exchange_share is None:
            return None
        return cls(group, settings.at_most, settings.exchange_share)

    @property
    def length(self) -> tf.Tensor:
        """The number of steps of a round that begins now."""
        return self._length.read_value()

    def pause(self) -> None:
        """Excludes the time until the next step from the measurement; called outside a graph."""
        times = self._times.numpy()
        times[0] = 0
        self._times.assign(times)

    def end_step(self, done: tf.Tensor) -> None:
        """Counts a step when `done` is known, unless other work took time since the last step."""
        now = time_after([done])
        since, seconds, steps, *of_exchanges = tf.unstack(self._times.read_value())
        counts = tf.cast(since > 0, tf.float64)
        took = counts * tf.maximum(now - since, 0)
        self._times.assign(tf.stack([now, seconds + took, steps + counts, *of_exchanges]))

    def measured(
        self, reduce: Callable[[tf.Tensor], StepResult], shares: Sequence[tf.Tensor]
    ) -> StepResult:
        """Measures the exchange of `shares`, and has the workers elect the next round's length.

        Args:
            reduce: Exchanges them along with the worker's votes.
            shares: The worker's shares of the mean pseudo-gradients.

        Returns:
            The result of `reduce`.
        """
        _, *before = tf.unstack(self._times.read_value())
        seconds, steps, of_exchanges, exchanges = before
        known = tf.logical_and(steps > 0, exchanges > 0)
        own = vote(
            tf.math.divide_no_nan(seconds, steps),
            tf.math.divide_no_nan(of_exchanges, exchanges),
            self._lengths,
            self._exchange_share,
        )
        began = time_after(shares)
        result = reduce(tf.logical_and(own, known))
        ended = time_after([result.finite])
        # Connections are made in the first exchange, when no step has been counted.
        took = tf.where(steps > 0, [tf.maximum(ended - began, 0), 1], tf.zeros(2, tf.float64))
        kept = _KEPT * tf.stack(before)
        self._times.assign(tf.concat([[ended], kept[:2], kept[2:] + took], 0))
        if result.votes is not None:
            self._length.assign(elected(result.votes, self._lengths, self._length.read_value()))
        return result


def time_after(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the time in seconds, once the tensors are computed."""
    with tf.control_dependencies(tensors):
        return tf.timestamp()
