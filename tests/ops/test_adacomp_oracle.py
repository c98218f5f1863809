"""Tests that the fused ops compute the same bits as the text of the paper."""

import itertools

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.bounds import assert_close, rounding
from tests.ops.adacomp_cases import (
    DTYPES,
    assert_same_bits,
    decode,
    encode,
    encode_by_reference,
    normal,
)
from tests.reference import adacomp as reference
from tests.reference import payload as payload_format
from tf_gradcomp import ops

BIN_SIZES = (1, 4, 50, 63, 64, 500, 16383)
SCALE_FACTORS = (1.0, 1.5, 2.0, 3.0)


def sizes_around(bin_size):
    return sorted({0, 1, bin_size - 1, bin_size, bin_size + 1, 140_001})  # the last has 3 blocks


def decided_by_the_last_bit(bin_size, scale_factor):
    """A tensor where the first element of each bin is sent or not by how its H was rounded."""
    residual, gradient = normal(100_000, 1, 1), normal(100_000, 0.3, 2)
    boost = np.float32(scale_factor) - np.float32(1)
    accumulated = residual + gradient
    rounded_twice = np.abs(accumulated + boost * gradient)
    product = np.float64(boost) * gradient.astype(np.float64)  # exact
    fused = np.abs(accumulated.astype(np.float64) + product).astype(np.float32)
    some = np.flatnonzero((rounded_twice != fused) & (fused > np.abs(accumulated)))[:2000]
    assert some.size > 0
    residuals = np.zeros((some.size, bin_size), np.float32)
    gradients = np.zeros_like(residuals)
    residuals[:, 0], gradients[:, 0] = residual[some], gradient[some]
    residuals[:, 1] = np.maximum(rounded_twice, fused)[some]  # the maximum of its bin
    return residuals.reshape(-1), gradients.reshape(-1)


class OracleTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(itertools.product(BIN_SIZES, DTYPES))
    def test_payload_and_residual_equal_the_reference(self, bin_size, dtype):
        for size, scale_factor in itertools.product(sizes_around(bin_size), SCALE_FACTORS):
            with self.subTest(size=size, scale_factor=scale_factor):
                tensors = [normal(size, 1.0, 1)], [normal(size, 0.3, 2, dtype)], [bin_size]
                encoded = encode(*tensors, scale_factor=scale_factor)
                expected = encode_by_reference(*tensors, scale_factor=scale_factor)
                self.assertAllEqual(encoded.payload, expected.payload)
                assert_same_bits(encoded.residuals[0], expected.residuals[0])
                assert encoded.tensor_bytes == expected.tensor_bytes

    @parameterized.parameters(2, 50, 500)
    def test_no_multiply_add_is_fused(self, bin_size):
        residual, gradient = decided_by_the_last_bit(bin_size, 1.7)
        encoded = encode([residual], [gradient], [bin_size], scale_factor=1.7)
        expected = encode_by_reference([residual], [gradient], [bin_size], scale_factor=1.7)
        self.assertAllEqual(encoded.payload, expected.payload)
        accumulated, boosted = ops.residual_accumulate(residual, gradient, scale_factor=1.7)
        positions, _ = ops.local_bin_select(accumulated, boosted, bin_size=bin_size)
        sent = reference.decode_payload(expected.payload, [residual.shape], [bin_size])[0]
        self.assertAllEqual(positions, np.flatnonzero(sent))

    def test_many_tensors_of_all_kinds_share_one_payload(self):
        shapes = [(3, 3, 5, 7), (), (500, 30), (0, 4), (30,), (17,), (3, 40000)]
        bin_sizes = [50, 500, 500, 50, 0, 63, 1000]
        residuals = [normal(shape, 1.0, i) for i, shape in enumerate(shapes)]
        gradients = [normal(shape, 0.3, 10 + i, DTYPES[i % 3]) for i, shape in enumerate(shapes)]
        encoded = encode(residuals, gradients, bin_sizes)
        expected = encode_by_reference(residuals, gradients, bin_sizes)
        self.assertAllEqual(encoded.payload, expected.payload)
        assert encoded.tensor_bytes == expected.tensor_bytes
        assert 56 + sum(encoded.tensor_bytes) == encoded.payload.nbytes
        for left, right in zip(encoded.residuals, expected.residuals, strict=True):
            assert_same_bits(left, right)

    def test_golden_vector(self):
        residual = np.array([8, 0, -4, 1, -14, 6, 0, 1, 0, 0, 4], np.float32) / 16
        gradient = np.array([2, 6, -2, 0, 4, 1, 0, 0, 0, 0, 1], np.float32) / 16
        encoded = encode([residual], [gradient], [4])
        header, body = payload_format.read(encoded.payload)
        assert header.method == 1
        assert np.frombuffer(body, np.float32, 1)[0] == np.float32(25 / 3 / 16)
        assert list(body[8:]) == [0, 5, 253, 9]
        expected = np.array([5 / 3, -7 / 3, -6, 1, -10, 7, 0, 1, 0, 0, -10 / 3]) / 16
        assert_close(encoded.residuals[0], expected, terms=3)

    @parameterized.parameters(itertools.product((50, 63, 500, 16383), (0.3, 0.0)))
    def test_round_trip(self, bin_size, deviation):
        for size in sizes_around(bin_size):
            residual, gradient = normal(size, deviation, 1), normal(size, deviation, 2)
            residual[: size // 3] = gradient[: size // 3] = 0  # zero bins
            sent = reference.pack(residual, gradient, bin_size, 2.0).sent
            payload = encode([residual], [gradient], [bin_size]).payload
            (reduced,), finite = decode([payload], [[size]], [bin_size])
            self.assertAllEqual(reduced, sent)
            assert finite

    def test_replicas_are_added_in_their_order(self):
        size, bin_sizes = 70000, [50, 500, 0]
        payloads = [
            encode([normal(size, 1, i)] * 3, [normal(size, 10.0**i, i)] * 3, bin_sizes).payload
            for i in range(5)
        ]
        reduced, finite = decode(payloads, [[size]] * 3, bin_sizes)
        expected = [np.zeros(size, np.float32)] * 3
        for payload in payloads:
            sent = reference.decode_payload(payload, [[size]] * 3, bin_sizes)
            expected = [total + values for total, values in zip(expected, sent, strict=True)]
        for actual, total in zip(reduced, expected, strict=True):
            assert_same_bits(actual.numpy(), total)
        assert finite

    @parameterized.parameters(itertools.product((1, 50, 500), DTYPES, SCALE_FACTORS))
    def test_fused_op_is_the_composition_of_the_three(self, bin_size, dtype, scale_factor):
        residual, gradient = normal(10007, 1.0, 1), normal(10007, 0.3, 2, dtype)
        accumulated, boosted = ops.residual_accumulate(
            residual, gradient, scale_factor=scale_factor
        )
        positions, bin_max = ops.local_bin_select(accumulated, boosted, bin_size=bin_size)
        signs, scale, left = ops.ternary_quantize(accumulated, positions, bin_max)
        encoded = encode([residual], [gradient], [bin_size], scale_factor=scale_factor)
        assert_same_bits(left.numpy(), encoded.residuals[0])
        sent = np.zeros(10007, np.float32)
        sent[positions.numpy()] = signs.numpy() * scale.numpy()
        self.assertAllEqual(
            sent, reference.decode_payload(encoded.payload, [[10007]], [bin_size])[0]
        )

    @parameterized.parameters(50, 500, 0)
    def test_no_part_of_a_gradient_is_lost(self, bin_size):
        residual = np.zeros(4001, np.float32)
        said = np.zeros(4001)
        sent = np.zeros(4001)
        for step in range(100):
            gradient = normal(4001, 0.3, step)
            encoded = encode([residual], [gradient], [bin_size])
            residual = encoded.residuals[0]
            said += gradient
            sent += reference.decode_payload(encoded.payload, [[4001]], [bin_size])[0]
        bound = rounding(np.abs(said).max(), terms=2, steps=100)
        self.assertAllClose(sent + residual, said, rtol=0, atol=bound)

    def test_put_back_restores_residual_plus_gradient(self):
        shapes, bin_sizes = [(30, 50), (7,)], [50, 0]
        residuals = [normal(shape, 1, i) for i, shape in enumerate(shapes)]
        gradients = [normal(shape, 0.3, 5 + i) for i, shape in enumerate(shapes)]
        variables = [tf.Variable(residual) for residual in residuals]
        settings = {"bin_sizes": bin_sizes, "fingerprint": 1}
        payload, _ = ops.adacomp_encode(variables, gradients, 0, **settings)
        ops.adacomp_put_back(variables, payload, **settings)
        for variable, residual, gradient in zip(variables, residuals, gradients, strict=True):
            total = residual + gradient
            bound = rounding(np.abs(total).max(), terms=2)
            self.assertAllClose(variable, total, rtol=0, atol=bound)
