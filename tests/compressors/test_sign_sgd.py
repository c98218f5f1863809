"""Tests properties of SignSGD alone; test_conformance has the others."""

import numpy as np

from tests.compressors.lockstep import Lockstep, specs_of
from tests.reference import sign_sgd
from tf_gradcomp.compressors import SignSGD


def step(gradients):
    """The outcome of the first step, from empty residuals."""
    return Lockstep(SignSGD(), specs_of(gradients[0]), len(gradients)).step(gradients)


def test_each_element_gets_its_sign_times_the_mean_magnitude():
    gradient = np.array([3, -1, 0.5, -0.25, 0.25], np.float32)
    (reduced,) = step([[gradient]]).reduced[0]
    np.testing.assert_array_equal(reduced, [1, -1, 1, -1, 1])


def test_zeros_of_either_sign_count_as_positive():
    gradient = np.array([-4, 0, -0.0, 4], np.float32)
    (reduced,) = step([[gradient]]).reduced[0]
    np.testing.assert_array_equal(reduced, [-2, 2, 2, 2])


def test_replicas_are_summed():
    gradients = [[np.array([1, -1], np.float32)], [np.array([3, 3], np.float32)]]
    (reduced,) = step(gradients).reduced[0]
    np.testing.assert_array_equal(reduced, [4, 2])


def test_an_element_takes_one_bit_and_a_tensor_one_mean():
    gradients = [np.ones(shape, np.float32) for shape in [(1,), (32,), (33,), (1000, 1000), (0,)]]
    words = [1 + 1, 1 + 1, 1 + 2, 1 + 31250, 0]
    np.testing.assert_array_equal(step([gradients]).tensor_bytes[0], 4 * np.array(words))


def test_the_mean_is_summed_in_more_than_float32():
    gradient = np.full(3_000_000, 0.1, np.float32)
    gradient[0] = 1e6
    exact = np.abs(gradient.astype(np.float64)).mean()
    (reduced,) = step([[gradient]]).reduced[0]
    assert reduced[1] == np.float32(exact)
    assert sign_sgd.mean_magnitude(gradient) == reduced[1]


def test_the_residual_makes_the_sum_of_steps_follow_the_sum_of_gradients():
    rng = np.random.default_rng(0)
    mean = rng.uniform(-1, 1, size=1000).astype(np.float32)
    lockstep = Lockstep(SignSGD(), specs_of([mean]), 1)
    sent = np.zeros(1000)
    for _ in range(400):
        sent += lockstep.step([[mean]]).reduced[0][0]
    assert np.abs(sent / 400 - mean).max() < 0.05  # signs alone are off by up to a half


def test_a_replica_that_is_not_finite_sends_as_many_words():
    good = [np.ones((40, 30), np.float32)]
    bad = [np.full((40, 30), np.nan, np.float32)]
    outcome = step([good, bad])
    assert [payload.size for payload in outcome.payloads] == [14 + 1 + 38] * 2
    assert not outcome.payloads[1][14:].any()
