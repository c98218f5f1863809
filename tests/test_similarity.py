"""The measures of how alike learners are, against the same in NumPy."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from tf_gradcomp.simulation import task

pytestmark = pytest.mark.quick


def tensors(*seeds, shapes=((30, 20), (7,))):
    return [
        [
            tf.constant(np.random.default_rng([s, i]).normal(size=shape), tf.float32)
            for i, shape in enumerate(shapes)
        ]
        for s in seeds
    ]


def test_union_density_is_the_share_that_is_not_zero():
    assert task.union_density([tf.constant([0.0, 1, 0, -2]), tf.zeros([4])]) == 0.25


@pytest.mark.parametrize("learners", [2, 5])
def test_cosine_distance_is_the_mean_over_pairs(learners):
    residuals = tensors(*range(learners))
    flat = [
        np.concatenate([np.ravel(t) for t in replica_residuals]) for replica_residuals in residuals
    ]
    cosines = [
        a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in itertools.combinations(flat, 2)
    ]
    expected = 1 - np.mean(cosines)
    assert task.mean_cosine_distance(residuals) == pytest.approx(expected, abs=1e-5)


def test_cosine_distance_of_the_same_is_0_and_of_opposites_2():
    (one,) = tensors(1)
    assert task.mean_cosine_distance([one, one]) == pytest.approx(0, abs=1e-5)
    opposite = [-t for t in one]
    assert task.mean_cosine_distance([one, opposite]) == pytest.approx(2, abs=1e-5)


@pytest.mark.parametrize("residuals", [[], [[]], [[], []], tensors(1), [[tf.zeros(3)]] * 2])
def test_cosine_distance_of_nothing(residuals):
    assert math.isnan(task.mean_cosine_distance(residuals))


def test_hamming_distance_counts_what_is_not_among_the_largest():
    wanted = [tf.constant([9.0, -8, 7, 1, 0, 0])]
    sent = {0: [1, 1, 0, 0, 0, 0], 0.5: [0, 1, 0, 1, 0, 0], 1: [0, 0, 0, 0, 0, 1]}
    for expected, places in sent.items():
        assert task.hamming_distance([tf.constant(places, tf.float32)], wanted) == expected
    assert math.isnan(task.hamming_distance([tf.zeros(6)], wanted))
