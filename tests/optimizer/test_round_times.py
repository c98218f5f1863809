"""The length of a round by the times of steps and exchanges: compared with arithmetic."""

import types

import numpy as np
import pytest
import tensorflow as tf

from tf_gradcomp.exchange.step import StepResult
from tf_gradcomp.keras.common import round_times
from tf_gradcomp.keras.common.round_times import RoundTimes, choices, elected, vote

ALONE = types.SimpleNamespace(create=lambda make: make(), local=lambda variable, _: variable)


class Worker:
    """A worker whose steps and exchanges take given times; other workers vote separately."""

    def __init__(self, monkeypatch, step, exchange, at_most=64, others=()):
        self.step, self.exchange, self._now = step, exchange, 1000.0
        self._others = others
        self.times = RoundTimes(ALONE, at_most, 0.125)
        monkeypatch.setattr(round_times, "time_after", lambda _: tf.constant(self._now, tf.float64))

    def round(self):
        """Takes a round, and returns its length."""
        length = int(self.times.length)
        for _ in range(length):
            self._now += self.step
            self.times.end_step(tf.constant(True))
        self.times.measured(self._reduce, [])
        return length

    def _reduce(self, votes):
        self._now += self.exchange
        of_all = votes.numpy()
        for lengths in self._others:
            of_all |= np.equal(choices(64), lengths)
        return StepResult([], tf.constant(True), [], tf.constant(of_all))


def test_lengths_are_powers_of_two_and_the_longest():
    assert choices(64) == [1, 2, 4, 8, 16, 32, 64]
    assert choices(48) == [1, 2, 4, 8, 16, 32, 48]
    assert choices(1) == [1]


@pytest.mark.parametrize(
    ("step", "exchange", "length"),
    # With a share of 1/8, a round takes at least seven times as long as its exchange.
    [(7.0, 1.0, 1), (7.0, 1.01, 2), (1.0, 4.0, 32), (1.0, 9.0, 64), (1.0, 99.0, 64), (0, 1.0, 64)],
)
def test_vote_is_for_the_shortest_round_whose_exchange_takes_at_most_its_share(
    step, exchange, length
):
    votes = vote(step, exchange, choices(64), 1 / 8).numpy()
    assert np.array(choices(64))[votes] == [length]


def test_shortest_length_with_a_vote_is_elected_but_no_more_than_twice_the_last():
    def next_length(voted, length):
        return int(elected(tf.constant(np.isin(choices(64), voted)), choices(64), length))

    assert next_length([8, 64], 16) == 8
    assert next_length([1], 64) == 1
    assert next_length([64], 4) == 8
    assert next_length([], 4) == 4


def test_rounds_double_up_to_the_length_that_the_times_call_for(monkeypatch):
    worker = Worker(monkeypatch, step=1.0, exchange=2.0)  # 14 steps, so 16
    # Connections are made in the first exchange, and the second one has a time only once it ends.
    assert [worker.round() for _ in range(8)] == [1, 1, 1, 2, 4, 8, 16, 16]
    worker.exchange = 0.25  # 1.75 steps, so 2; half of the mean is of earlier ones
    assert [worker.round() for _ in range(8)] == [16, 16, 8, 8, 4, 4, 4, 2]


def test_time_between_rounds_is_none_of_a_step(monkeypatch):
    worker = Worker(monkeypatch, step=1.0, exchange=1.0)  # 7 steps, so 8
    lengths = []
    for _ in range(9):
        lengths.append(worker.round())
        worker.times.pause()
        worker._now += 1000.0
    assert lengths == [1] * 9


def test_worker_without_times_leaves_the_choice_to_others(monkeypatch):
    worker = Worker(monkeypatch, step=1.0, exchange=2.0, others=[[4]])
    assert [worker.round() for _ in range(4)] == [1, 2, 4, 4]
