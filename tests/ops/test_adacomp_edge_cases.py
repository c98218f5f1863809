"""Inputs that training produces sooner or later, and that have no obvious answer."""

import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import assert_close
from tests.ops.adacomp_cases import (
    FINGERPRINT,
    assert_same_bits,
    decode,
    encode,
    encode_by_reference,
    normal,
)
from tf_gradcomp import ops

NON_FINITE = [np.inf, -np.inf, np.nan]
HEADER_WORDS = 14


def assert_as_reference(residual, gradient, bin_size, **settings):
    encoded = encode([residual], [gradient], [bin_size], **settings)
    expected = encode_by_reference([residual], [gradient], [bin_size], **settings)
    np.testing.assert_array_equal(encoded.payload, expected.payload)
    assert_same_bits(encoded.residuals[0], expected.residuals[0])
    return encoded


@pytest.mark.parametrize("bin_size", [50, 500])
def test_zero_gradients_send_one_code_per_bin(bin_size):
    zeros = np.zeros(1000, np.float32)
    encoded = assert_as_reference(zeros, zeros, bin_size)
    assert encoded.tensor_bytes[0] == 8 + {50: 20, 500: 4}[bin_size]


@pytest.mark.parametrize("bin_size", [50, 500])
def test_equal_elements_are_all_sent(bin_size):
    ones = np.ones(1000, np.float32)
    encoded = assert_as_reference(np.zeros_like(ones), ones, bin_size)
    assert not encoded.residuals[0].any()
    (reduced,), _ = decode([encoded.payload], [[1000]], [bin_size])
    np.testing.assert_array_equal(reduced, ones)


def test_a_gradient_that_cancels_the_residual_clears_it():
    residual = normal(1000)
    encoded = assert_as_reference(residual, -residual, 50)
    assert not encoded.residuals[0].any()


def test_negative_zeros_are_as_in_the_reference():
    signed_zeros = np.tile(np.array([0.0, -0.0], np.float32), 500)
    for gradient in (signed_zeros, -signed_zeros, -np.zeros(1000, np.float32)):
        assert_as_reference(signed_zeros, gradient, 50)


def test_denormals_are_not_flushed():
    tiny = normal(1000) * np.float32(1e-40)
    assert_as_reference(tiny, tiny[::-1].copy(), 50)


def test_denormals_are_not_flushed_on_tensorflows_threads():
    size = 1 << 20
    tiny = normal(size) * np.float32(1e-40)
    assert_as_reference(tiny, tiny[::-1].copy(), 500)
    payload = encode([tiny], [tiny], [500]).payload
    (reduced,), _ = decode([payload, payload], [[size]], [500])
    assert np.count_nonzero(reduced)


def test_boosting_may_overflow_where_the_sum_does_not():
    gradient = normal(100, 1e37)
    gradient[7] = 3e38
    assert_as_reference(np.zeros(100, np.float32), gradient, 50, scale_factor=3.0)


@pytest.mark.parametrize("bad", NON_FINITE)
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_one_non_finite_element_flags_the_step(bad, dtype):
    gradient = normal(1003, 0.3, dtype=dtype)
    for index in (0, 511, 1002):
        broken = gradient.copy()
        broken[index] = bad
        encoded = encode([normal(1003, 1, 1)], [broken], [50])
        expected = encode_by_reference([normal(1003, 1, 1)], [broken], [50])
        np.testing.assert_array_equal(encoded.payload, expected.payload)
        assert encoded.payload.size == HEADER_WORDS
        assert encoded.tensor_bytes == [0]


@pytest.mark.parametrize("bad", NON_FINITE)
@pytest.mark.parametrize("bad_tensor", range(4))
def test_a_flagged_step_leaves_all_residuals_as_they_were(bad, bad_tensor):
    sizes, bin_sizes = [1_200_000, 1_200_000, 5003, 70], [50, 500, 0, 63]
    residuals = [normal(size, 1, i) for i, size in enumerate(sizes)]
    gradients = [
        normal(size, 1e30, 9 + i) for i, size in enumerate(sizes)
    ]  # next to them, all is lost
    gradients[bad_tensor][sizes[bad_tensor] // 2] = bad
    encoded = encode(residuals, gradients, bin_sizes)
    for before, after in zip(residuals, encoded.residuals, strict=True):
        assert_same_bits(after, before)


def test_a_sum_that_overflows_flags_the_step():
    residual = np.array([1, 3e38], np.float32)
    encoded = encode([residual], [np.array([0, 3e38], np.float32)], [50])
    assert encoded.payload.size == HEADER_WORDS
    assert_same_bits(encoded.residuals[0], residual)


def test_one_flagged_replica_makes_the_sum_zero_and_not_finite():
    good = encode([normal(100)], [normal(100)], [50])
    bad = encode([normal(100)], [np.full(100, np.nan, np.float32)], [50])
    for payloads in ([good.payload, bad.payload], [bad.payload, good.payload]):
        (reduced,), finite = decode(payloads, [[100]], [50])
        assert not finite
        assert not np.any(reduced)


@pytest.mark.parametrize("bin_size", [0, 50])
def test_a_sum_over_replicas_that_overflows_is_zero_and_not_finite(bin_size):
    huge = np.full(100, 3e38, np.float32)
    payload = encode([np.zeros_like(huge)], [huge], [bin_size]).payload
    _, finite = decode([payload], [[100]], [bin_size])
    assert finite
    (reduced,), finite = decode([payload, payload], [[100]], [bin_size])
    assert not finite
    assert not np.any(reduced)


def test_a_flagged_payload_puts_nothing_back():
    variable = tf.Variable(normal(100))
    before = variable.numpy()
    bad = encode([normal(100)], [np.full(100, np.inf, np.float32)], [50])
    ops.adacomp_put_back([variable], bad.payload, bin_sizes=[50], fingerprint=FINGERPRINT)
    assert_same_bits(variable.numpy(), before)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1, 1)])
@pytest.mark.parametrize("bin_size", [0, 1, 50, 500])
def test_scalars_and_empty_tensors(shape, bin_size):
    residual, gradient = normal(shape, 1, 1), normal(shape, 1, 2)
    encoded = assert_as_reference(residual, gradient, bin_size)
    (reduced,), finite = decode([encoded.payload], [shape], [bin_size])
    assert reduced.shape == shape
    assert finite
    assert_close(reduced + encoded.residuals[0], residual + gradient, terms=2)


def test_millions_of_elements():
    size = 2_000_003
    residual, gradient = normal(size, 1, 1), normal(size, 0.3, 2)
    encoded = assert_as_reference(residual, gradient, 500)
    (reduced,), finite = decode([encoded.payload], [[size]], [500])
    assert finite
    assert_close(reduced.numpy() + encoded.residuals[0], residual + gradient, terms=2)


def test_positions_and_maxima_of_a_non_finite_bin():
    accumulated = np.array([1, np.inf, 2, 3, np.nan], np.float32)
    positions, bin_max = ops.local_bin_select(accumulated, accumulated, bin_size=2)
    assert positions.numpy().tolist() == [3]
    np.testing.assert_array_equal(bin_max, np.array([np.inf, 3, np.nan], np.float32))
