"""Tests ScaleCom's values in fewer bits; test_conformance.py tests all compressors."""

import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import rounding
from tests.compressors.lockstep import Lockstep, assert_equal_bits, specs_of
from tests.compressors.methods import few_bits
from tests.compressors.test_conformance import assert_as_oracle, random_gradients
from tf_gradcomp import ops
from tf_gradcomp.compressors import ScaleCom

FEW = [16, 8, 4, 1]
GATHERED = [8, 4, 1]
every_number = pytest.mark.parametrize("bits", FEW)


def step_of(compressor, gradients):
    return Lockstep(compressor, specs_of(gradients[0]), len(gradients)).step(gradients)


def total(arrays):
    return sum(map(np.float64, arrays))


def lost(outcome, gradients):
    """Returns the largest part of gradients that was neither sent nor kept, without residuals."""
    given, kept = (zip(*arrays, strict=True) for arrays in (gradients, outcome.residuals))
    rows = zip(given, outcome.reduced[0], kept, strict=True)
    return max(np.abs(total(had) - reduced - total(left)).max() for had, reduced, left in rows)


@pytest.mark.parametrize("bits", [8, 1])
def test_other_numbers_of_bits_equal_the_oracle(bits):
    method = few_bits(bits, rates=9, beta=0.5, overrides={"_3": None})
    shapes = [(40, 30), (3, 3, 7, 11), (5,), (60,), (0, 3)]
    steps = [random_gradients(shapes, 3, seed=s, dtype=np.float16) for s in range(4)]
    steps[1][2][0][3, 4] = np.nan
    assert_as_oracle(method, steps, graph=True)


@every_number
def test_the_entries_and_dense_variables_equal_32_bits(bits):
    gradients = random_gradients([(40, 30), (500,), (20, 7)], 3)
    compressor = {
        value_bits: ScaleCom(20, overrides={"_2": None}, value_bits=value_bits)
        for value_bits in (32, bits)
    }
    plain, few = (step_of(compressor[b], gradients).reduced[0] for b in (32, bits))
    for i in range(2):
        assert not few[i][plain[i] == 0].any()
        assert (few[i] != 0).sum() > 0.9 * (plain[i] != 0).sum()
    assert_equal_bits(few[2], plain[2])


def test_values_are_levels_of_the_largest_or_signs_of_the_mean():
    gradient = np.float32([[14, 1], [2.9, 1], [-3.1, 1], [0.9, 0]])
    few, one = (
        step_of(ScaleCom(2, value_bits=bits), [[gradient]]).reduced[0][0][:, 0] for bits in (4, 1)
    )
    assert few.tolist() == [14, 2, -4, 0]
    assert one.tolist() == pytest.approx([5.225, 5.225, -5.225, 5.225])


@pytest.mark.parametrize(("replicas", "scale"), [(1, 1.0), (3, 2.0**100), (3, 2.0**-60), (64, 1.0)])
def test_sums_of_16_bits_are_exact_at_any_size(replicas, scale):
    gradients = [
        [np.float32(scale) * np.rint(100 * g)] for (g,) in random_gradients([(40, 30)], replicas)
    ]
    gradients[0][0][0, 0] = scale * 2.0**20  # above 65504, and a scale that levels are exact for
    outcome = step_of(ScaleCom(4, value_bits=16), gradients)
    assert outcome.finite[0]
    assert outcome.payloads[0].dtype == np.float16
    assert outcome.reduced[0][0].any()
    assert lost(outcome, gradients) == 0


@every_number
@pytest.mark.parametrize("leaders", [0.0, 1e-42, 3e38], ids=repr)
def test_nothing_is_lost_for_any_entries_of_the_leader(bits, leaders):
    gradients = random_gradients([(40, 30)], 2)
    gradients[0][0][:] = leaders
    outcome = step_of(ScaleCom(20, value_bits=bits), gradients)
    assert outcome.finite == [True, True]
    assert all(np.isfinite(residual).all() for (residual,) in outcome.residuals)
    assert lost(outcome, gradients) <= rounding(max(10, leaders), terms=8)


@every_number
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_leader_that_is_not_finite_is_skipped_by_all(bits, bad):
    gradients = random_gradients([(40, 30), (7,)], 2)
    gradients[0][0][3, 3] = bad
    outcome = step_of(ScaleCom(20, value_bits=bits), gradients)
    assert outcome.finite == [False, False]
    assert not any(residual.any() for residual in outcome.residuals[0])
    for residual, gradient in zip(outcome.residuals[1], gradients[1], strict=True):
        assert_equal_bits(residual, gradient)


@pytest.mark.parametrize("bits", [4, 1])
def test_rounding_errors_are_sent_later(bits):
    gradients = random_gradients([(30, 20)], 2)
    lockstep = Lockstep(ScaleCom(2, value_bits=bits), specs_of(gradients[0]), 2)
    sent = lockstep.step(gradients).reduced[0][0]
    zeros = [
        [np.zeros_like(array) for array in replica_gradients] for replica_gradients in gradients
    ]
    for _ in range(30):
        sent = sent + lockstep.step(zeros).reduced[0][0]
    given = sum(gradient for (gradient,) in gradients)
    assert np.linalg.norm(sent - given) < 0.2 * np.linalg.norm(given)


@pytest.mark.parametrize(
    ("bits", "value_bytes"), [(16, 400 + 2), (8, 200 + 56 + 4), (4, 100 + 56 + 4), (1, 28 + 56 + 4)]
)
def test_bytes_count_offsets_scale_and_codes(bits, value_bytes):
    gradients = random_gradients([(200, 400)], 4)
    outcome = step_of(ScaleCom(400, value_bits=bits), gradients)
    offsets = 4 * -(-200 * 9 // 32) + (4 if bits == 16 else 0)
    assert outcome.payload_bytes == [offsets // 4 + value_bytes] * 4
    passed_on = 3 * value_bytes if bits in GATHERED else 2 * 3 * value_bytes // 4
    assert outcome.sent_bytes == [3 * offsets // 4 + passed_on] * 4


def written(step=3, settings=(5, 7), fingerprint=11, finite=True):
    body = tf.range(1, 6)
    return ops.payload_write(
        body,
        tf.constant(step, tf.int64),
        tf.constant(finite),
        settings=settings,
        method=5,
        fingerprint=fingerprint,
    ).numpy()


def read(rows, settings=(5, 7)):
    step = tf.constant(3, tf.int64)
    return ops.payload_read(np.stack(rows), step, settings=settings, method=5, fingerprint=11)


def test_headers_are_taken_off_again():
    bodies, finite, lengths = read([written(), written()])
    assert lengths.numpy().tolist() == [5, 5]
    assert bodies.numpy().tolist() == [[1, 2, 3, 4, 5]] * 2
    assert finite
    bodies, finite, _ = read([written(), written(finite=False)])
    assert bodies.numpy().tolist() == [[1, 2, 3, 4, 5], [0] * 5]
    assert not finite


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"step": 4}, "step 4; expected 3"),
        ({"fingerprint": 12}, "fingerprint 12; expected 11"),
        ({"settings": (5, 8)}, "follows another plan"),
        ({"settings": (5, 7, 1)}, "3 tensors; expected 2"),
    ],
    ids=repr,
)
def test_payloads_of_others_are_refused(other, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"payload of replica 1: .*{message}"):
        read([written(), written(**other)])


def test_any_wrong_word_is_noticed():
    for word in range(14 + 5):
        broken = written()
        broken[word] ^= 1 << word % 31
        with pytest.raises(tf.errors.InvalidArgumentError, match="payload of replica 1"):
            read([written(), broken])
