"""Tests CountSketch's estimates; test_conformance.py tests the behaviour of all compressors."""

import numpy as np
import pytest
import tensorflow as tf

from tests.compressors.lockstep import Lockstep, specs_of
from tests.reference import count_sketch
from tf_gradcomp.compressors import CountSketch
from tf_gradcomp.compressors.base import StepInputs

SIZE, COLUMNS = 2000, 64


def estimated(values, step, rows=3):
    hashes = count_sketch.hashes(step, len(values), COLUMNS)[:rows]
    return count_sketch.estimates(count_sketch.sketch(values, hashes, COLUMNS), hashes)


def test_estimates_are_right_on_average():
    values = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    estimates = [estimated(values, step, rows=1) for step in range(300)]
    errors = np.mean(estimates, 0) - values
    # Each entry's error has about this deviation; the mean of the errors has a smaller deviation.
    deviation = np.linalg.norm(values) / np.sqrt(COLUMNS) / np.sqrt(300)
    assert abs(errors.std() / deviation - 1) < 0.1
    assert np.abs(errors).max() < 5 * deviation


def test_a_heavy_entry_is_found():
    found = 0
    for seed in range(1000):
        values = np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)
        values[seed] = 0
        values[seed] = 4.2 * np.linalg.norm(values) / np.sqrt(COLUMNS)
        found += seed in count_sketch.largest(estimated(values, seed), 16)
    assert found >= 990


def test_replicas_find_the_largest_entries_of_the_sum():
    """The largest entries of each replica cancel out."""
    generator = np.random.default_rng(0)
    noise = generator.normal(size=(2, 100, 200)).astype(np.float32)
    common = np.zeros((100, 200), np.float32)
    indices = generator.choice(20_000, 4, replace=False)
    common.reshape(-1)[indices] = 100
    apart = np.roll(common, 7) * 2
    gradients = [[noise[0] + common + apart], [noise[1] + common - apart]]
    outcome = Lockstep(CountSketch(0.001), specs_of(gradients[0]), 2).step(gradients)
    total = np.add(*(replica_gradients[0] for replica_gradients in gradients)).reshape(-1)
    (reduced,) = outcome.reduced[0]
    np.testing.assert_array_equal(reduced.reshape(-1)[indices], total[indices])
    assert np.count_nonzero(reduced) == 4 * 20


def test_bytes_do_not_grow_with_the_number_of_replicas():
    gradient = np.ones((100, 100), np.float32)
    given = 4 * (1 + (3 * 4 + 4) * 10)
    assert CountSketch().payload_bytes(specs_of([gradient])) == given
    for size in (2, 8):
        outcome = Lockstep(CountSketch(), specs_of([gradient]), size).step([[gradient]] * size)
        assert outcome.payload_bytes == [given] * size
        assert outcome.sent_bytes[0] == pytest.approx(2 * (size - 1) / size * given, abs=2)


def test_tensors_that_a_sketch_would_not_shrink_are_summed_whole():
    gradients = [[np.ones((5, 6), np.float32), np.ones(40, np.float32)]] * 2
    compressor, specs = CountSketch(0.1), specs_of(gradients[0])
    inputs = StepInputs(specs, (), {}, tf.constant(0, tf.int64), tf.constant(True), 0, 2)
    assert compressor.delayed(inputs).numpy().tolist() == [False, False]
    assert compressor.payload_bytes(specs) == 4 * (1 + 70)
    for reduced in Lockstep(compressor, specs, 2).step(gradients).reduced[0]:
        assert (reduced == 2).all()


EXAMPLES, FEATURES, WORKERS = 2000, 2000, 4


def loss_after_training(select):
    """Sparse logistic regression, each gradient divided by the root of its second moment."""
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(EXAMPLES, FEATURES)) * np.exp(generator.normal(size=FEATURES))
    rows = (rows * (generator.random(rows.shape) < 0.02)).astype(np.float32)
    truth = generator.normal(size=FEATURES) * (generator.random(FEATURES) < 0.1)
    signs = np.where(rows @ truth > 0, 1, -1).astype(np.float32)
    weights = np.zeros(FEATURES, np.float32)
    left, moments = np.zeros((2, WORKERS, FEATURES), np.float32)
    for step in range(200):
        for worker in range(WORKERS):
            batch = generator.integers(0, EXAMPLES // WORKERS, 32) * WORKERS + worker
            slopes = -signs[batch] / (1 + np.exp(signs[batch] * (rows[batch] @ weights)))
            gradient = rows[batch].T @ slopes / len(batch)
            moments[worker] += 0.01 * (gradient**2 - moments[worker])
            root = np.sqrt(moments[worker] / (1 - 0.99 ** (step + 1)))
            left[worker] += gradient / (root + 1e-7) / WORKERS
        indices = select(left.sum(0), step)
        weights[indices] -= 0.01 * left[:, indices].sum(0)
        left[:, indices] = 0
    return np.logaddexp(0, -signs * (rows @ weights)).mean()


def test_trains_as_the_exact_choice_of_the_largest_entries():
    def by_sketch(total, step):
        hashes = count_sketch.hashes(step, FEATURES, 160)
        estimates = count_sketch.estimates(count_sketch.sketch(total, hashes, 160), hashes)
        return count_sketch.largest(estimates, 160)

    exact = loss_after_training(lambda total, _: count_sketch.largest(total, 40))
    assert loss_after_training(by_sketch) <= 1.1 * exact
