"""Gathering vectors of different lengths, by replicas that are threads."""

import concurrent.futures
import threading

import numpy as np
import pytest
import tensorflow as tf

from tf_gradcomp.groups import communicator

pytestmark = [pytest.mark.oldest, pytest.mark.quick]
MOST = communicator._MOST_AHEAD


class Threads(communicator.Communicator):
    """A replica that is a thread."""

    def __init__(self, rank, gather, ahead):
        super().__init__(2, rank)
        self._gather = gather
        self.ahead = ahead

    def all_gather(self, row):
        return self._gather(self.rank, row[0])


class Replicas:
    """Two replicas that gather step by step.

    Attributes:
        lengths: Of what each collective of the last step gathered.
        ahead: A variable of each, or None.
    """

    def __init__(self, ahead=True):
        self._barrier = threading.Barrier(2, timeout=60)
        self._given = [None, None]
        self.ahead = [tf.Variable(0, dtype=tf.int64) if ahead else None for _ in range(2)]
        self.lengths = []

    def step(self, *lengths):
        """Gathers 1, 2, 3 and so on; returns the first replica's result and input."""
        self.lengths = []
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            rows, given = zip(*pool.map(self._one, range(2), lengths), strict=True)
        np.testing.assert_array_equal(*rows)
        assert given[0] == given[1] == sum(self.lengths)
        return rows[0]

    def _one(self, rank, length):
        replica = Threads(rank, self._gather, self.ahead[rank])
        rows, given = replica.all_gather_padded(tf.range(1, length + 1))
        return rows.numpy(), int(given)

    def _gather(self, rank, values):
        self._given[rank] = values.numpy()
        self._barrier.wait()
        rows = np.stack(self._given)
        if rank == 0:
            self.lengths.append(len(values))
        self._barrier.wait()
        return tf.constant(rows)


def padded(*lengths):
    return [list(range(1, n + 1)) + [0] * (max(lengths) - n) for n in lengths]


def test_without_a_variable_the_lengths_come_first():
    replicas = Replicas(ahead=False)
    for _ in range(2):
        assert replicas.step(5, 3).tolist() == padded(5, 3)
        assert replicas.lengths == [1, 5]


def test_payloads_that_fit_the_last_room_are_sent_with_the_lengths():
    replicas = Replicas()
    assert replicas.step(80, 60).tolist() == padded(80, 60)
    assert replicas.lengths == [1, 80]
    for lengths in ((80, 60), (50, 70), (0, 85)):
        assert replicas.step(*lengths).tolist() == padded(*lengths)
        assert len(replicas.lengths) == 1


def test_entries_that_do_not_fit_are_gathered_whole():
    replicas = Replicas()
    replicas.step(80, 60)
    assert replicas.step(60, 95).tolist() == padded(60, 95)
    assert replicas.lengths == [1 + 90, 95]
    assert [int(words) for words in replicas.ahead] == [106] * 2


def test_the_room_shrinks_when_less_is_sent():
    replicas = Replicas()
    replicas.step(800, 600)
    for _ in range(60):
        replicas.step(80, 60)
    assert [int(words) for words in replicas.ahead] == [90] * 2


@pytest.mark.parametrize("length", [0, 1])
def test_next_to_nothing_is_gathered(length):
    replicas = Replicas()
    for _ in range(3):
        assert replicas.step(length, 0).tolist() == padded(length, 0)


def test_long_vectors_are_not_sent_with_their_lengths():
    replicas = Replicas()
    for _ in range(2):
        replicas.step(MOST, 7)
        assert replicas.lengths == [1, MOST]
    replicas.step(MOST // 2, 7)
    replicas.step(MOST // 2, 7)
    assert len(replicas.lengths) == 1
