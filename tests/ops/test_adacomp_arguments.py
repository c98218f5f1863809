"""Wrong arguments are one clear sentence, eagerly and while a graph is built."""

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.adacomp_cases import decode, encode, normal
from tf_gradcomp import ops

WRONG = (tf.errors.InvalidArgumentError, ValueError)  # in eager execution, in a graph
TEN = np.zeros(10, np.float32)
HEADER = np.zeros(14, np.int32)


@pytest.fixture(params=["eager", "graph"])
def call(request):
    return tf.function if request.param == "graph" else lambda function: function


@pytest.mark.parametrize("bin_size", [-1, 16384, 2**40])
def test_a_bin_size_out_of_range(call, bin_size):
    message = rf"bin_sizes\[1\] is {bin_size}; expected 1 to 16383, or 0 to send"
    variables = [tf.Variable(TEN), tf.Variable(TEN)]
    layout = {"bin_sizes": [50, bin_size], "fingerprint": 0}
    with pytest.raises(WRONG, match=message):
        call(lambda: ops.adacomp_encode(variables, [TEN, TEN], 0, **layout))()
    with pytest.raises(WRONG, match=message):
        call(lambda: decode([HEADER], [(10,)] * 2, [50, bin_size]))()
    with pytest.raises(WRONG, match=message):
        call(lambda: ops.adacomp_put_back(variables, HEADER, **layout))()


def test_not_one_bin_size_per_tensor(call):
    variable = tf.Variable(TEN)
    with pytest.raises(WRONG, match="bin_sizes has 2 entries; expected 1"):
        call(lambda: ops.adacomp_encode([variable], [TEN], 0, bin_sizes=[50, 50], fingerprint=0))()


def test_not_one_gradient_per_residual(call):
    variable = tf.Variable(TEN)
    with pytest.raises(WRONG, match="2 gradients for 1 residuals"):
        call(lambda: ops.adacomp_encode([variable], [TEN, TEN], 0, bin_sizes=[50], fingerprint=0))()


def test_a_gradient_of_another_shape():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"gradient 1 has shape \[2,5\]"):
        encode([TEN, TEN], [TEN, TEN.reshape(2, 5)], [50, 50])


def test_a_gradient_of_another_shape_is_found_while_the_graph_is_built():
    variable = tf.Variable(TEN)

    @tf.function
    def step():
        ops.adacomp_encode([variable], [TEN.reshape(2, 5)], 0, bin_sizes=[50], fingerprint=0)

    with pytest.raises(ValueError, match="Shapes must be equal rank"):
        step.get_concrete_function()


def test_a_residual_that_is_not_float32(call):
    variable = tf.Variable(TEN.astype(np.float16))
    with pytest.raises(WRONG, match="residual 0 is a variable of half; expected float32"):
        call(lambda: ops.adacomp_encode([variable], [TEN], 0, bin_sizes=[50], fingerprint=0))()


def test_a_residual_given_twice():
    variable = tf.Variable(TEN)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a residual is given twice"):
        ops.adacomp_encode([variable] * 2, [TEN] * 2, 0, bin_sizes=[50] * 2, fingerprint=0)


def test_a_residual_that_is_not_initialized():
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[10], shared_name="never_assigned")
    with pytest.raises(tf.errors.NotFoundError):
        ops.adacomp_encode([handle], [TEN], 0, bin_sizes=[50], fingerprint=0)


def test_a_step_that_is_not_a_scalar(call):
    variable = tf.Variable(TEN)
    with pytest.raises(WRONG, match=r"step has shape|Shape must be rank 0"):
        call(lambda: ops.adacomp_encode([variable], [TEN], [1], bin_sizes=[50], fingerprint=0))()


def test_not_one_shape_per_tensor():
    with pytest.raises(tf.errors.InvalidArgumentError, match="bin_sizes has 2 entries"):
        decode([HEADER], [(10,)], [50, 50])


@pytest.mark.parametrize("positions", [[3, 3], [4, 3], [-1], [10]])
def test_positions_that_do_not_ascend_within_the_tensor(positions):
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"positions\[\d\] is"):
        ops.ternary_quantize(TEN, np.array(positions, np.int64), TEN[:1])


def test_steps_of_different_shapes():
    with pytest.raises(tf.errors.InvalidArgumentError, match="residual and gradient have shapes"):
        ops.residual_accumulate(TEN, normal(11))
    with pytest.raises(tf.errors.InvalidArgumentError, match="accumulated and boosted have"):
        ops.local_bin_select(TEN, normal(11), bin_size=4)
