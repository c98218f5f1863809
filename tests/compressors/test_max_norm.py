"""Tests max-norm quantization; test_conformance.py tests the behaviour of all compressors."""

import numpy as np
import pytest
import tensorflow as tf

from tests.compressors.lockstep import Lockstep, assert_equal_bits, specs_of
from tf_gradcomp.compressors import QSGD, MaxNormQuantization
from tf_gradcomp.compressors.contrib.max_norm import _code_width, _packed, _sum, _unpacked
from tf_gradcomp.groups.communicator import RequestStream, communicate
from tf_gradcomp.groups.lockstep import lockstep_communicators

ROUNDINGS = 100_000


def sent(compressor, share):
    """Returns the sent values of many entries that are a share of the largest entry, which is 1."""
    gradient = np.full(ROUNDINGS + 1, share, np.float32)
    gradient[-1] = 1
    all_gradients = [[gradient.reshape(1, -1)]]
    (reduced,) = Lockstep(compressor, specs_of(all_gradients[0]), 1).step(all_gradients).reduced[0]
    return reduced[0, :-1].astype(np.float64)


BORDER = 3 / 63  # with (2, 6): the largest code in the finer unit


@pytest.mark.parametrize(
    ("bits", "shares"),
    [
        (2, [0.001, 1 / 3, 0.5, 0.9, 1]),
        (4, [0.001, -0.3, 7 / 15, 0.99, -1]),
        (8, [1e-5, 0.3, -0.997]),
        ((2, 6), [0.01, -0.03, BORDER, BORDER * 1.01, 0.06, 1 / 3, -0.8, 1]),
    ],
)
def test_rounding_is_right_on_average(bits, shares):
    for share in shares:
        values = sent(MaxNormQuantization(bits), share)
        levels = np.unique(values)
        assert len(levels) <= 2
        standard_error = np.ptp(levels) / 2 / np.sqrt(ROUNDINGS)
        assert abs(values.mean() - share) <= 4 * standard_error + 2**-22


def test_the_unit_of_a_pair_depends_on_the_value_alone():
    below, above = (np.abs(sent(MaxNormQuantization((2, 6)), BORDER * f)) for f in (0.999, 1.001))
    assert np.unique(np.round(63 * below)).tolist() == [2, 3]
    assert np.unique(np.round(3 * above)).tolist() == [0, 1]


def test_an_entry_takes_the_coarse_unit_if_one_replica_needs_it():
    gradients = np.float32([[0.01, 0.01, 1], [0.01, -0.9, 1]])
    given = [[gradient.reshape(1, -1)] for gradient in gradients]
    units = np.float32([[1 / 63, 1 / 3, 1 / 3]])
    for step in range(20):
        lockstep = Lockstep(MaxNormQuantization((2, 6)), specs_of(given[0]), 2)
        for _ in range(step):  # each step draws other numbers
            lockstep.skip_a_step()
        outcome = lockstep.step(given)
        for (had,), (left,) in zip(given, outcome.residuals, strict=True):
            codes = (had - left) / units
            np.testing.assert_allclose(codes, np.round(codes), atol=1e-5)
            assert (np.abs(codes) <= 3.5).all()


def test_replicas_round_each_in_its_own_way():
    gradient = np.random.default_rng(0).normal(size=(100, 100)).astype(np.float32)
    lockstep = Lockstep(MaxNormQuantization(), specs_of([gradient]), 2)
    outcomes = [lockstep.step([[gradient]] * 2) for _ in range(2)]
    left = [
        replica_residuals[0].reshape(-1)
        for outcome in outcomes
        for replica_residuals in outcome.residuals
    ]
    up = np.array(left) < 0  # what remains of an entry that was rounded up, or away from zero
    same = [(first == second).mean() for i, first in enumerate(up) for second in up[:i]]
    assert max(same) < 0.8


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
def test_sums_of_codes_are_exact(bits, replicas):
    generator = np.random.default_rng(bits)
    most = 2 * (2**bits - 1)
    codes = generator.integers(0, most + 1, (replicas, 100))
    codes[:, :40], codes[:, 40:60] = most, 0
    width = _code_width(bits, replicas)
    streams = [RequestStream(_sum([tf.constant(code, tf.float32)], [width])) for code in codes]
    for sums in communicate(streams, lockstep_communicators(replicas))[0]:
        assert sums[0].numpy().tolist() == codes.sum(0).tolist()


@pytest.mark.parametrize("replicas", [1, 1000, 2**20, 2**40 + 1])
def test_no_sum_of_any_number_of_replicas_overflows(replicas):
    for bits in (2, 8):
        largest, width = 2 * (2**bits - 1), _code_width(bits, replicas)
        codes = tf.constant([largest, 0, largest, largest, 1, 0, largest], tf.float32)
        total = _unpacked(_packed(codes, width) * replicas, width, 7)
        assert total.numpy().tolist() == [replicas * int(code) for code in codes]


def test_bytes_of_a_replica_hardly_grow_with_their_number():
    """From 4 replicas on fewer than QSGD does with as many bits."""
    gradient = np.ones((1, 63 * 1024), np.float32)
    sent_bytes = {}
    for size in (2, 4, 5, 8, 32):
        for compressor in (MaxNormQuantization(), QSGD()):
            lockstep = Lockstep(compressor, specs_of([gradient]), size)
            sent_bytes[compressor.name, size] = lockstep.step([[gradient]] * size).sent_bytes[0]
    for size, lanes in ((2, 10), (4, 9), (5, 7), (8, 7), (32, 6)):
        words = -(-gradient.size // lanes)
        ring, gathered = 2 * (size - 1) * 8 * words // size, (size - 1) * (56 + 4)
        assert sent_bytes["max_norm", size] == ring + gathered
        fewer = sent_bytes["max_norm", size] < sent_bytes["qsgd", size]
        assert fewer == (size >= 4)


def test_vectors_of_known_length_are_summed_in_pieces():
    """A graph knows the lengths, so that communicators may cut long ones into pieces."""
    gradient = np.ones((40, 60), np.float32)
    lockstep = Lockstep(MaxNormQuantization((2, 6)), specs_of([gradient]), 2)
    known = []

    @tf.function(autograph=False)
    def step():
        ends = lockstep._exchanged(
            [[tf.constant(gradient)]] * 2,
            tf.constant(0, tf.int64),
            tf.constant(True),
            lockstep._compressor,
        )
        known.extend(given.shape[0] for given in ends[0].given)

    step()
    assert known == [14 + 1, -(-2400 // 31), -(-2400 // 15)]


def test_scales_too_small_to_divide_are_zeros():
    gradient = np.full((3, 4), 1e-36, np.float32)
    outcome = Lockstep(MaxNormQuantization(), specs_of([gradient]), 2).step([[gradient]] * 2)
    assert not outcome.reduced[0][0].any()
    for replica_residuals in outcome.residuals:
        assert_equal_bits(replica_residuals[0], gradient)
