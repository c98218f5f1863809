"""Sums over replicas by TensorFlow's collectives."""

import numpy as np
import pytest
import tensorflow as tf

from tests.replicas import collective, per_replica
from tf_gradcomp.compressors.requests import AllReduce
from tf_gradcomp.groups import communicator
from tf_gradcomp.groups.agreement import Processes
from tf_gradcomp.groups.current import current_group

pytestmark = [pytest.mark.oldest, pytest.mark.quick]
ELEMENTS = 1001


def sums(dtype="float32"):
    """Returns the results of two replicas, and the number of collectives."""
    strategy = collective()
    given = [np.arange(ELEMENTS) % 97, np.arange(ELEMENTS) % 89]

    def all_reduce(values):
        return current_group().communicator().sum(AllReduce(values))

    run = tf.function(lambda values: strategy.run(all_reduce, (values,)), autograph=False)
    values = per_replica(strategy, [tf.constant(one, dtype) for one in given])
    operations = run.get_concrete_function(values).graph.get_operations()
    collectives = sum(operation.type.startswith("CollectiveReduce") for operation in operations)
    answers = strategy.experimental_local_results(run(values))
    for answer in answers:
        np.testing.assert_array_equal(answer.numpy(), sum(given))
    return collectives / len(answers)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_long_vector_is_summed_in_pieces(monkeypatch, dtype):
    monkeypatch.setattr(communicator, "_PIECE_BYTES", 1000)
    assert sums(dtype) == (5 if dtype == "float32" else 3)


def test_a_short_vector_is_summed_at_once(monkeypatch):
    assert sums() == 1
    monkeypatch.setattr(communicator, "_PIECE_BYTES", 4 * ELEMENTS)
    assert sums() == 1


def test_a_vector_whose_length_is_not_known_is_summed_at_once(monkeypatch):
    monkeypatch.setattr(communicator, "_PIECE_BYTES", 1000)
    strategy = collective()
    length = tf.Variable(ELEMENTS)

    def all_reduce():
        return current_group().communicator().sum(AllReduce(tf.ones([length])))

    run = tf.function(lambda: strategy.run(all_reduce), autograph=False)
    for answer in strategy.experimental_local_results(run()):
        np.testing.assert_array_equal(answer.numpy(), np.full(ELEMENTS, 2.0))


@pytest.mark.parametrize(("metadata", "more"), [(None, 0), (3, 12)], ids=["alone", "with metadata"])
def test_counts_more_bytes_than_32_bits_hold(metadata, more):
    class Silent(communicator.Communicator):
        def all_reduce(self, values):
            return values

    elements = 600_000_000

    @tf.function  # which makes no tensor that nothing is read of
    def payload_bytes():
        request = AllReduce(tf.zeros([elements]), tf.zeros([metadata]) if metadata else None)
        return Silent(size=2, rank=0).answer(request)[1]

    assert [int(count) for count in payload_bytes()] == [4 * elements + more] * 2


def test_a_timeout_of_the_exchange_itself_is_no_worker_that_did_not_come():
    def late(value):
        raise TimeoutError("of the program's own")

    with pytest.raises(TimeoutError, match="of the program's own"):
        Processes(2, True, late).agree({"next action": "training"}, 60)
