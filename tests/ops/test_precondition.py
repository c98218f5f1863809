"""The op that divides gradients by the roots of their second moments."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.reference.precondition import precondition as oracle
from tf_gradcomp import ops

SHAPES = [(3,), (70_000,), (), (0,), (17, 5)]
ADAM = {"beta_2": 0.999, "epsilon": 1e-7}


def draw(step, dtype=np.float32):
    generator = np.random.default_rng(step)
    return [generator.normal(size=shape).astype(dtype) for shape in SHAPES]


def new_moments():
    return [tf.Variable(tf.zeros(shape)) for shape in SHAPES]


def precondition(moments, gradients, step, **settings):
    return ops.precondition(ops.SecondMoments(moments, step, **settings), gradients)


def squares_of(gradients):
    """Returns squares for all gradients except two."""
    drawn = [np.abs(gradient).astype(np.float32) for gradient in gradients]
    return [None, *drawn[1:4], None]


class PreconditionTest(tf.test.TestCase):
    def test_equals_the_oracle_over_steps(self):
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            moments = new_moments()
            expected = [np.zeros(shape, np.float32) for shape in SHAPES]
            for step in range(1, 5):
                gradients = draw(step, dtype)
                adam = {**ADAM, "scale": 4, "corrects_epsilon": step % 2 == 0}
                divided = precondition(moments, gradients, step, **adam)
                for i, gradient in enumerate(gradients):
                    wanted, expected[i] = oracle(expected[i], gradient, step, **adam)
                    np.testing.assert_array_equal(divided[i].numpy(), wanted)
                    np.testing.assert_array_equal(moments[i].numpy(), expected[i])

    def test_each_gradient_may_be_at_its_own_step(self):
        for amsgrad in (False, True):
            moments, gradients, steps = new_moments(), draw(1), [1, 7, 3, 2, 5000]
            largest = new_moments() if amsgrad else ()
            given = ops.SecondMoments(moments, steps, **ADAM, largest=largest)
            together = ops.precondition(given, gradients)
            for i, gradient in enumerate(gradients):
                local = ([tf.Variable(tf.zeros(SHAPES[i]))] for _ in range(2))
                moment, largest = next(local), next(local) if amsgrad else ()
                given = ops.SecondMoments(moment, steps[i], **ADAM, largest=largest)
                self.assertAllEqual(together[i], ops.precondition(given, [gradient])[0])
                self.assertAllEqual(moments[i], moment[0])

    def test_given_squares_are_taken_in_place_of_the_gradients_own(self):
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            moments, gradients = new_moments(), draw(1, dtype)
            squares = squares_of(gradients)
            divided = precondition(moments, gradients, 2, squares=squares, **ADAM)
            for i, gradient in enumerate(gradients):
                start = np.zeros(SHAPES[i], np.float32)
                wanted, moment = oracle(start, gradient, 2, squares=squares[i], **ADAM)
                np.testing.assert_array_equal(divided[i].numpy(), wanted)
                np.testing.assert_array_equal(moments[i].numpy(), moment)

    def test_in_a_graph_and_from_handles(self):
        moments = new_moments()
        divide = tf.function(
            lambda gradients, step: precondition(
                [moment.handle for moment in moments], gradients, step, **ADAM
            )
        )
        divided = divide(draw(1), tf.constant(1, tf.int64))
        self.assertAllEqual([value.shape for value in divided], SHAPES)
        for value, gradient in zip(divided, draw(1), strict=True):
            self.assertAllClose(value, np.sign(gradient), rtol=0, atol=0.05)

    def test_the_value_that_was_read_before_stays(self):
        (moment,) = moments = [tf.Variable(tf.zeros(3))]
        before = moment.read_value()
        precondition(moments, [tf.ones(3)], 1, **ADAM)
        self.assertAllEqual(before, np.zeros(3))
        self.assertNotAllEqual(moment, np.zeros(3))

    def test_zeros_stay_zeros(self):
        moments = new_moments()
        divided = precondition(moments, [tf.zeros(shape) for shape in SHAPES], 1, **ADAM)
        for value in divided:
            self.assertAllEqual(value, np.zeros(value.shape))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e20], ids=str)
def test_where_a_square_is_not_finite_moments_stay_and_all_is_nan(bad):
    moments = new_moments()
    precondition(moments, draw(1), 1, **ADAM)
    before = [moment.numpy() for moment in moments]
    gradients = draw(2)
    gradients[1][69_999] = bad
    divided = precondition(moments, gradients, 2, **ADAM)
    for value, moment, old in zip(divided, moments, before, strict=True):
        assert np.isnan(value.numpy()).all()
        np.testing.assert_array_equal(moment.numpy(), old)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("is_gradient", [True, False], ids=["gradient", "square"])
def test_gradients_and_given_squares_must_be_finite(bad, is_gradient):
    moments, gradients = new_moments(), draw(1)
    squares = squares_of(gradients)
    (gradients if is_gradient else squares)[1][7] = bad
    divided = precondition(moments, gradients, 1, squares=squares, **ADAM)
    assert all(np.isnan(value).all() for value in divided)
    assert not any(moment.numpy().any() for moment in moments)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beta_2": 1.0}, "beta_2 is 1"),
        ({"beta_2": -0.1}, "beta_2 is -0.1"),
        ({"epsilon": 0.0}, "epsilon is 0"),
        ({"scale": 0.0}, "scale is 0"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"step": 0}, "step is 0"),
        ({"step": [1, 2]}, r"step has shape \[2\]; expected a scalar, or one for each of 1"),
        ({"gradients": [tf.zeros(4)]}, r"gradient 0 has shape \[4\]; expected \[3\]"),
        ({"gradients": [tf.zeros(3)] * 2}, "2 gradients for 1 residuals"),
        ({"squares": [tf.zeros(3)] * 2}, "2 squares for 1 gradients"),
        ({"squares": [tf.zeros(4)]}, r"squares 0 have shape \[4\]; expected \[3\]"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_refuses(wrong, message):
    right = {"gradients": [tf.zeros(3)], "step": 1, **ADAM}
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        precondition([tf.Variable(tf.zeros(3))], **{**right, **wrong})
