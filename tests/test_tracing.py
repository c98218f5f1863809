"""Tests that what tests/tracing.py changes in TensorFlow is there, and harmless."""

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops


def test_iterators_of_one_form_share_functions_and_have_their_own_elements(monkeypatch):
    functions = []
    of_devices = multi_device_iterator_ops._create_device_dataset

    def noting(dataset, *args):
        functions.append((dataset._init_func, dataset._next_func, dataset._finalize_func))
        return of_devices(dataset, *args)

    monkeypatch.setattr(multi_device_iterator_ops, "_create_device_dataset", noting)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    def numbers(start):
        dataset = tf.data.Dataset.range(start, start + 6).batch(2)
        return iter(strategy.experimental_distribute_dataset(dataset))

    first, second = numbers(0), numbers(10)
    seen = [next(each).numpy() for each in (first, second, first, second)]
    np.testing.assert_array_equal(seen, [[0, 1], [10, 11], [2, 3], [12, 13]])
    del first
    np.testing.assert_array_equal(next(second), [14, 15])
    np.testing.assert_array_equal(
        [list(numbers(0)), list(numbers(0))], [[[0, 1], [2, 3], [4, 5]]] * 2
    )
    assert len(functions) == 4
    assert len(set(functions)) == 1


def test_ops_keep_no_stacks():
    stacks = []
    tf.function(lambda x: stacks.append((x + 1).op.traceback))(tf.ones(2))
    assert stacks == [None]
