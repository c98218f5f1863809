"""AdaComp's encoder with second moments: first divided, then encoded, in one pass."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import adam_bound, assert_close
from tests.ops.adacomp_cases import (
    DTYPES,
    FINGERPRINT,
    assert_same_bits,
    divide_and_encode_by_reference,
    encode,
    normal,
)
from tf_gradcomp import ops

ADAM = {"step": 3, "beta_2": 0.999, "epsilon": 1e-7, "scale": 2.0}
BIN_SIZES = (0, 1, 50, 63, 64, 500, 1500, 16383)
SIZES = (0, 1, 49, 1023, 1024, 1500, 140_001)  # a strip has about 1024, the last has 3 blocks
BAD = [np.inf, -np.inf, np.nan, 1e20]
HEADER_WORDS = 14


def moments_like(gradients):
    return [np.abs(normal(g.shape, 0.1, 90 + i)) for i, g in enumerate(gradients)]


def not_finite_in_the_end(size):
    residual = np.zeros(size, np.float32)
    residual[-1] = np.inf
    return residual


def assert_given_back(after, before, gradient, beta_2=ADAM["beta_2"]):
    """Checks that moments are not negative, at most their old values, and lower only by
    rounding."""
    with np.errstate(over="ignore", invalid="ignore"):
        created = beta_2 * before + (1 - beta_2) * gradient.astype(np.float64) ** 2
    assert ((after >= 0) & (after <= before)).all()
    assert ((before - after <= 2**-19 * created) | ~np.isfinite(gradient)).all()


def assert_as_reference(residuals, gradients, bin_sizes, moments, adam=ADAM):
    encoded = encode(residuals, gradients, bin_sizes, moments, adam)
    expected = divide_and_encode_by_reference(residuals, gradients, bin_sizes, moments, adam)
    np.testing.assert_array_equal(encoded.payload, expected.payload)
    assert encoded.tensor_bytes == expected.tensor_bytes
    for name in ("residuals", "moments"):
        pairs = zip(getattr(encoded, name), getattr(expected, name), strict=True)
        for actual, by_reference in pairs:
            assert_same_bits(actual, by_reference)
    return encoded


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("bin_size", BIN_SIZES)
def test_is_one_oracle_after_the_other(bin_size, dtype):
    for size in SIZES:
        gradients = [normal(size, 0.3, 2, dtype)]
        assert_as_reference([normal(size)], gradients, [bin_size], moments_like(gradients))


def test_many_tensors_over_steps():
    shapes = [(3, 3, 5, 7), (), (500, 30), (0, 4), (30,), (17,), (3, 40000)]
    bin_sizes = [50, 500, 500, 50, 0, 63, 1000]
    residuals, moments = ([np.zeros(shape, np.float32) for shape in shapes] for _ in range(2))
    for step in range(1, 6):
        gradients = [
            normal(shape, 0.3, 10 * step + i, DTYPES[i % 3]) for i, shape in enumerate(shapes)
        ]
        adam = {**ADAM, "step": step}
        encoded = assert_as_reference(residuals, gradients, bin_sizes, moments, adam)
        residuals, moments = encoded.residuals, encoded.moments


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_given_squares_are_taken_in_place_of_the_gradients_own(dtype):
    sizes, bin_sizes = [140_001, 0, 1023, 500], [50, 50, 0, 500]
    gradients = [normal(size, 0.3, i, dtype) for i, size in enumerate(sizes)]
    squares = [np.abs(normal(size, 1, 5 + i)) for i, size in enumerate(sizes)]
    squares[3] = None
    residuals = [normal(size, 1, 50 + i) for i, size in enumerate(sizes)]
    adam = {**ADAM, "squares": squares}
    assert_as_reference(residuals, gradients, bin_sizes, moments_like(gradients), adam)


def test_a_square_that_is_not_finite_changes_nothing():
    gradients = [normal(3000), normal(70)]
    squares = [np.abs(normal(3000, 9)), np.abs(normal(70, 9))]
    squares[1][69] = np.inf
    moments = moments_like(gradients)
    zeros = [np.zeros(3000, np.float32), np.zeros(70, np.float32)]
    encoded = encode(zeros, gradients, [50, 50], moments, {**ADAM, "squares": squares})
    assert encoded.payload.size == HEADER_WORDS
    for before, after in zip(
        [*zeros, *moments], [*encoded.residuals, *encoded.moments], strict=True
    ):
        assert_same_bits(after, before)


def test_zero_gradients_stay_zero_and_let_second_moments_decay():
    zeros = np.zeros(3000, np.float32)
    moments = moments_like([zeros])
    encoded = assert_as_reference([zeros], [zeros], [50], moments)
    assert not encoded.residuals[0].any()
    assert (encoded.moments[0] < moments[0]).all()


def test_a_moment_whose_correction_overflows_still_divides():
    gradient, zeros = np.full(60, 3e18, np.float32), np.zeros(60, np.float32)
    adam = {**ADAM, "step": 1, "scale": 64.0}
    encoded = assert_as_reference([zeros], [gradient], [50], [zeros], adam)
    assert np.isfinite(encoded.moments[0]).all()
    sent = np.frombuffer(encoded.payload.tobytes(), np.float32)[HEADER_WORDS]
    assert_close(sent, 1 / 8, adam_bound())


def test_denormals_are_not_flushed():
    tiny = normal(5000) * np.float32(1e-40)
    assert_as_reference([tiny], [tiny], [50], [np.abs(tiny)])
    roots = normal(5000) * np.float32(1e-21)  # their squares are denormal
    assert_as_reference([tiny], [roots], [50], [np.abs(tiny)])


@functools.cache
def large_tensors():
    """Returns residuals, gradients far above all before, and second moments."""
    sizes = [1_200_000, 1_200_000, 5003, 70]
    return (
        [normal(size, 1, i) for i, size in enumerate(sizes)],
        [normal(size, 3e9, 9 + i) for i, size in enumerate(sizes)],
        [np.abs(normal(size, 0.1, 90 + i)) for i, size in enumerate(sizes)],
    )


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize(
    ("bad_tensor", "place"),
    [
        *((tensor, place) for tensor in (0, 1) for place in (0, 700_000, 1_199_999)),
        *((2, 0), (2, 5002), (3, 0), (3, 69)),
    ],
)
def test_a_gradient_that_is_not_finite_changes_nothing(bad, place, bad_tensor):
    residuals, given, moments = large_tensors()
    gradients = list(given)
    gradients[bad_tensor] = given[bad_tensor].copy()
    gradients[bad_tensor][place] = bad
    encoded = encode(residuals, gradients, [50, 500, 0, 63], moments, ADAM)
    assert encoded.payload.size == HEADER_WORDS
    after = [*encoded.residuals, *encoded.moments]
    for before, value in zip([*residuals, *moments], after, strict=True):
        assert_same_bits(value, before)


@pytest.mark.parametrize("beta_2", [0.5, 0.9, 0.999, 0.999999])
def test_second_moments_that_are_given_back_are_not_negative_and_at_most_what_they_were(beta_2):
    size = 200_000
    generator = np.random.default_rng(0)
    # Each may be negligible relative to the other.
    moment, gradient = 10 ** generator.uniform(-15, 15, (2, size)).astype(np.float32)
    moment[::7] = 0
    adam = {**ADAM, "beta_2": beta_2}
    (after,) = encode([not_finite_in_the_end(size)], [gradient], [50], [moment], adam).moments
    assert_given_back(after, moment, gradient, beta_2)
    assert np.count_nonzero(after) > size // 3


@pytest.mark.parametrize("beta_2", [0.0, 1e-38, 1e-3])
def test_second_moments_without_memory_are_given_back_finite(beta_2):
    gradient = normal(3000, 1e8)
    moment = np.full(3000, 1e20, np.float32)
    adam = {**ADAM, "beta_2": beta_2}
    (after,) = encode([not_finite_in_the_end(3000)], [gradient], [50], [moment], adam).moments
    assert ((after >= 0) & (after <= moment)).all()


def test_a_residual_that_is_not_finite_gives_second_moments_back():
    residuals = [np.array([1, np.inf], np.float32), np.ones(5, np.float32)]
    gradients = [np.ones(2, np.float32), np.ones(5, np.float32)]
    moments = moments_like(gradients)
    encoded = encode(residuals, gradients, [1, 0], moments, ADAM)
    assert encoded.payload.size == HEADER_WORDS
    assert encoded.residuals[0][1] == np.inf
    for before, after, gradient in zip(moments, encoded.moments, gradients, strict=True):
        assert_given_back(after, before, gradient)


def test_training_continues_after_a_flagged_step():
    sizes, bin_sizes = [70_003, 900], [50, 0]
    residuals, moments = ([np.zeros(size, np.float32) for size in sizes] for _ in range(2))
    for step in range(1, 7):
        gradients = [normal(size, 0.3, 10 * step + i) for i, size in enumerate(sizes)]
        adam = {**ADAM, "step": step}
        if step % 2:
            encoded = assert_as_reference(residuals, gradients, bin_sizes, moments, adam)
        else:
            gradients[0][40_000] = np.inf
            encoded = encode(residuals, gradients, bin_sizes, moments, adam)
            assert encoded.payload.size == HEADER_WORDS
        residuals, moments = encoded.residuals, encoded.moments


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1, 1)])
@pytest.mark.parametrize("bin_size", [0, 1, 500])
def test_scalars_and_empty_tensors(shape, bin_size):
    gradients = [normal(shape, 1, 2)]
    assert_as_reference([normal(shape)], gradients, [bin_size], moments_like(gradients))


def test_a_value_read_before_the_step_stays_as_it_was():
    residual, moment = tf.Variable(tf.zeros(1000)), tf.Variable(tf.ones(1000))
    before = moment.read_value()
    ops.adacomp_encode(
        [residual],
        [normal(1000)],
        0,
        bin_sizes=[50],
        fingerprint=0,
        second_moments=ops.SecondMoments([moment], 1, 0.9, 1e-7),
    )
    np.testing.assert_array_equal(before, np.ones(1000))
    assert (moment.numpy() != 1).all()


def test_put_back_leaves_second_moments_as_the_step_made_them():
    residual, moment = tf.Variable(tf.zeros(1000)), tf.Variable(tf.zeros(1000))
    gradient = normal(1000)
    layout = {"bin_sizes": [50], "fingerprint": FINGERPRINT}
    moments = ops.SecondMoments([moment], 1, 0.999, 1e-7)
    payload, _ = ops.adacomp_encode([residual], [gradient], 0, second_moments=moments, **layout)
    ops.adacomp_put_back([residual], payload, **layout)
    assert_close(moment, 0.001 * gradient**2, adam_bound())
    np.testing.assert_allclose(residual, np.sign(gradient), rtol=0, atol=0.05)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("variables", "wrong", "message"),
    [
        ([tf.zeros(3)], {}, "1 second moments for 2 residuals; expected one for each residual"),
        ([tf.zeros(3), tf.zeros(5)], {}, "second moment 1 has shape|Dimension.* must be equal"),
        (
            [tf.zeros(3), tf.zeros(4, tf.float16)],
            {},
            "second moment 1 is a variable of half; expected float32",
        ),
        (None, {"beta_2": 1.0}, "beta_2 is 1; expected 0 or more, and less than 1"),
        (None, {"epsilon": 0.0}, "epsilon is 0; expected a positive number"),
        (None, {"scale": float("inf")}, "scale is inf; expected a positive number"),
        (None, {"step": 0}, "adam_step is 0; expected 1 or more"),
        (None, {"squares": [tf.zeros(3)]}, "1 squares for 2 gradients; expected one for each"),
        (None, {"squares": [tf.zeros(3), tf.zeros(3)]}, r"squares 1 have shape \[3\]; expected"),
        (None, {"step": [1, 0]}, "adam_step is 0; expected 1 or more"),
        (None, {"step": [1]}, r"adam_step has shape \[1\]; expected a scalar, or one for each"),
    ],
    ids=str,
)
def test_refuses(graph, variables, wrong, message):
    residuals = [tf.Variable(tf.zeros(size)) for size in (3, 4)]
    moments = [tf.Variable(v) for v in variables or (tf.zeros(3), tf.zeros(4))]

    def step():
        ops.adacomp_encode(
            residuals,
            [tf.zeros(3), tf.zeros(4)],
            0,
            bin_sizes=[50, 50],
            fingerprint=0,
            second_moments=ops.SecondMoments(moments, **{**ADAM, **wrong}),
        )

    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
        (tf.function(step) if graph else step)()


@pytest.mark.parametrize("twice", [(0, 1), (0, 3), (2, 3)], ids=str)
def test_refuses_a_variable_in_two_roles(twice):
    variables = [tf.Variable(tf.zeros(3)) for _ in range(4)]
    variables[twice[1]] = variables[twice[0]]
    message = "a residual or second moment is given twice; expected a separate variable"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.adacomp_encode(
            variables[:2],
            [tf.zeros(3)] * 2,
            0,
            bin_sizes=[50, 50],
            fingerprint=0,
            second_moments=ops.SecondMoments(variables[2:], **ADAM),
        )
