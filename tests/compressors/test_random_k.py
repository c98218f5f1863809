"""Tests RandomK's draws; test_conformance.py tests the behaviour of all compressors."""

import numpy as np

from tests.compressors.lockstep import Lockstep, specs_of
from tf_gradcomp.compressors import RandomK


def places_of(compressor, steps, size=10_000):
    gradients = [[np.ones(size, np.float32)]] * 2
    lockstep = Lockstep(compressor, specs_of(gradients[0]), 2)
    return [np.flatnonzero(lockstep.step(gradients).reduced[0][0]) for _ in range(steps)]


def test_one_entry_of_each_chunk_is_drawn():
    for indices in places_of(RandomK(0.02), 3):
        assert (indices // 50).tolist() == list(range(200))


def test_draws_differ_by_step_alone():
    first, again = places_of(RandomK(0.02), 2), places_of(RandomK(0.02), 2)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first[0] != first[1]).mean() > 0.9


def test_draws_are_uniform():
    counts = np.bincount(np.concatenate(places_of(RandomK(0.1), 200, 1000)) % 10, minlength=10)
    expected = counts.sum() / 10
    assert ((counts - expected) ** 2 / expected).sum() < 33  # chi-square, 9 degrees, 1e-4


def test_no_index_travels():
    gradients = [[np.ones(10_000, np.float32)]] * 2
    outcome = Lockstep(RandomK(0.02), specs_of(gradients[0]), 2).step(gradients)
    assert outcome.payload_bytes == [4 * (200 + 1)] * 2
