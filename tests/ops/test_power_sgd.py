"""Tests PowerSGD's ops: arguments, variables, shapes, and results compared with the oracle."""

import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import assert_close
from tests.ops.adacomp_cases import DTYPES, assert_same_bits, normal
from tests.reference import power_sgd as reference
from tests.workers import run_workers
from tf_gradcomp import ops

WRONG = (tf.errors.InvalidArgumentError, ValueError)  # in eager execution, in a graph


@pytest.fixture(params=["eager", "graph"])
def call(request):
    return tf.function if request.param == "graph" else lambda function: function


class Replica:
    """A replica with tensors of given shapes; tensors with rank 0 are sent whole."""

    def __init__(self, shapes, ranks, dtype=tf.float32):
        self.ranks = ranks
        self.residuals = [
            tf.Variable(normal(shape, 0.1, seed)) for seed, shape in enumerate(shapes)
        ]
        self.gradients = [
            tf.constant(normal(shape, 1, 10 + seed, dtype)) for seed, shape in enumerate(shapes)
        ]
        self.factors = [
            tf.Variable(tf.zeros([shape[-1], rank] if rank else [0]))
            for shape, rank in zip(shapes, ranks, strict=True)
        ]

    def left(self, step=0):
        return ops.power_sgd_left(
            self.residuals, self.gradients, self.factors, step, ranks=self.ranks
        )

    def right(self, left):
        return ops.power_sgd_right(self.residuals, self.gradients, left, ranks=self.ranks)

    def reduce(self, left, right, right_sum, keep=True, finite=True):
        return ops.power_sgd_reduce(
            self.residuals,
            self.gradients,
            self.factors,
            left,
            right,
            right_sum,
            keep=keep,
            finite=finite,
            ranks=self.ranks,
        )

    def step(self, finite=True):
        left, _ = self.left()
        left, right, _ = self.right(left)
        return self.reduce(left, right, right, finite=finite)

    @property
    def sums(self):
        return [r.numpy() + g.numpy() for r, g in zip(self.residuals, self.gradients, strict=True)]


def test_vectors_are_laid_out_as_documented():
    replica = Replica([(30, 20), (7,), (40, 30)], [2, 0, 3])
    first, whole, second = replica.sums
    starts = reference.start([factor.numpy() for factor in replica.factors], 5)
    left, finite = replica.left(step=5)
    expected = [[0], (first @ starts[0]).T, whole, (second @ starts[2]).T]
    np.testing.assert_allclose(left, np.concatenate([np.ravel(e) for e in expected]), atol=1e-4)
    assert finite
    left, right, finite = replica.right(left)
    left_1, left_2 = np.reshape(left[1:61], (2, 30)), np.reshape(left[68:], (3, 40))
    np.testing.assert_array_equal(left[61:68], whole)
    expected = [left_1 @ first, left_2 @ second]
    np.testing.assert_allclose(right, np.concatenate([np.ravel(e) for e in expected]), atol=1e-4)
    assert finite


@pytest.mark.parametrize("smallest", [1, 1e-3, 1e-30])
def test_left_factors_are_orthonormal_or_zero(smallest):
    columns = normal((500, 6))
    columns[:, 3] = columns[:, 0] - columns[:, 1]
    columns[:, 4] = columns[:, 0] + 1e-3 * columns[:, 4]
    columns *= np.geomspace(1, smallest, 6)
    replica = Replica([(500, 40)], [6])
    left = np.concatenate([[0], columns.T.ravel()]).astype(np.float32)
    left = np.reshape(replica.right(left)[0][1:], (6, 500))
    assert_close(left @ left.T, np.diag([1, 1, 1, 0, 1, 1]), terms=500)
    np.testing.assert_allclose(left.T, reference.orthonormal(columns.astype(np.float32)), atol=1e-3)


def test_a_column_of_zeros_counts_as_values_that_depend_on_the_step():
    replica = Replica([(40, 30), (50, 40)], [2, 3])
    steps = [replica.left(step)[0].numpy() for step in (0, 0, 1, 2**32 + 1)]
    assert_same_bits(steps[0], steps[1])
    assert_same_bits(steps[2], steps[3])  # the lower half of the number
    assert (steps[0][1:] != steps[2][1:]).all()
    columns = steps[0][1:81].reshape(2, 40)
    assert abs(np.corrcoef(columns)[0, 1]) < 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensor", [0, 1])
def test_any_element_that_is_not_finite_is_flagged(dtype, bad, tensor):
    replica = Replica([(40, 30), (17,)], [2, 0], dtype)
    for element in (0, -1):
        values = replica.gradients[tensor].numpy()
        values.reshape(-1)[element] = bad
        replica.gradients[tensor] = tf.constant(values)
        left, finite = replica.left()
        assert not finite
        assert np.isnan(left[0])
        left, right, finite = replica.right(left)
        assert not finite
        assert not right.numpy().any()


@pytest.mark.parametrize("keep", [True, False])
def test_a_skipped_step_keeps_the_gradients_or_drops_them(keep):
    replica = Replica([(40, 30), (17,)], [2, 0])
    left, _ = replica.left()
    left, right, _ = replica.right(left)
    expected = replica.sums if keep else [residual.numpy() for residual in replica.residuals]
    reduced, finite = replica.reduce(left, right, right, keep=keep, finite=False)
    assert not finite
    assert not any(tensor.numpy().any() for tensor in reduced)
    for residual, values in zip(replica.residuals, expected, strict=True):
        assert_same_bits(residual.numpy(), values)
    assert not replica.factors[0].numpy().any()


@pytest.mark.parametrize(
    "large",
    [
        [(0, (3, 5), 3e38)],  # a matrix, by its product
        [(3, (slice(None), 7), 2e37)],
        [(1, 4, 2.5e38)],  # sent whole
        [(1, 4, 2.5e38), (4, 0, -2.5e38)],
    ],
    ids=str,
)
def test_only_tensors_with_too_large_sums_are_dropped(large):
    replica = Replica([(40, 30), (17,), (40, 30), (64, 50), (5,)], [2, 0, 2, 2, 0])
    for tensor, element, value in large:
        values = replica.gradients[tensor].numpy()
        values[element] = value
        replica.gradients[tensor] = tf.constant(values)
    expected = replica.sums
    for tensor, _, _ in large:
        expected[tensor] = np.zeros_like(expected[tensor])
    left, finite = replica.left()
    assert finite
    left, right, finite = replica.right(2 * left)  # another replica has the same
    reduced, finite = replica.reduce(left, right, 2 * right, finite=finite)
    assert not finite
    assert not any(tensor.numpy().any() for tensor in reduced)
    for residual, values in zip(replica.residuals, expected, strict=True):
        assert_same_bits(residual.numpy(), values)
    assert not any(factor.numpy().any() for factor in replica.factors)


@pytest.mark.parametrize(("stored", "rank"), [(4, 2), (2, 5), (5, 5), (3, 0)])
def test_a_rank_that_changes_keeps_the_first_columns(stored, rank):
    """As if the factor had as many columns as the rank, behind the kept ones of zeros."""
    before = normal((50, stored))
    kept = min(stored, rank)
    expected = Replica([(40, 50)], [rank])
    if rank:
        expected.factors[0].assign(np.pad(before[:, :kept], [(0, 0), (0, rank - kept)]))
    wide = Replica([(40, 50)], [rank])
    wide.factors = [tf.Variable(np.pad(before, [(0, 0), (0, 6 - stored)]))]
    for replica in (expected, wide):
        replica.reduced = replica.step()[0][0].numpy()
    assert_same_bits(wide.reduced, expected.reduced)
    assert_same_bits(wide.residuals[0].numpy(), expected.residuals[0].numpy())
    after = wide.factors[0].numpy()
    if rank:
        assert_same_bits(np.ascontiguousarray(after[:, :rank]), expected.factors[0].numpy())
    assert not after[:, rank:].any()


def test_values_read_before_the_step_stay_as_they_were():
    replica = Replica([(40, 30), (17,)], [2, 0])
    replica.factors[0].assign(normal((30, 2)))
    tensors = [variable.read_value() for variable in (*replica.residuals, *replica.factors)]
    left, _ = replica.left()
    tensors += [left, *replica.gradients]
    expected = [tensor.numpy().copy() for tensor in tensors]
    left, right, _ = replica.right(left)
    replica.reduce(left, right, right)
    for tensor, values in zip(tensors, expected, strict=True):
        assert_same_bits(tensor.numpy(), values)


def test_a_gradient_that_is_used_elsewhere_stays_as_it_was_in_a_graph():
    replica = Replica([(400, 300)], [2])
    gradient = replica.gradients[0]

    @tf.function
    def step(gradient):
        doubled = 2 * gradient  # a buffer that the op may take over
        replica.gradients = [doubled]
        reduced, _ = replica.step()
        return reduced[0], doubled, tf.reduce_sum(doubled)

    total = replica.residuals[0].numpy() + 2 * gradient.numpy()
    reduced, doubled, _ = step(gradient)
    assert_same_bits(doubled.numpy(), 2 * gradient.numpy())
    assert_close(reduced + replica.residuals[0].numpy(), total, terms=4)


def test_reduced_may_take_the_place_of_the_gradient_in_a_graph():
    replica = Replica([(400, 300)], [2])
    gradient = replica.gradients[0]
    expected = Replica([(400, 300)], [2])
    expected.gradients = [2 * gradient]

    @tf.function
    def step(gradient):
        replica.gradients = [2 * gradient]
        return replica.step()[0][0]

    assert_same_bits(step(gradient).numpy(), expected.step()[0][0].numpy())
    assert_same_bits(replica.residuals[0].numpy(), expected.residuals[0].numpy())


def test_ops_infer_their_shapes():
    replica = Replica([(40, 30), (17,)], [2, 0])

    @tf.function
    def step():
        left, finite = replica.left()
        assert [left.shape.rank, finite.shape.rank] == [1, 0]
        left, right, finite = replica.right(left)
        assert [left.shape.rank, right.shape.rank, finite.shape.rank] == [1, 1, 0]
        reduced, finite = replica.reduce(left, right, right)
        assert [tensor.shape.as_list() for tensor in (*reduced, finite)] == [[40, 30], [17], []]

    step()


@pytest.mark.parametrize("rank", [-1, 31])
def test_a_rank_out_of_range(call, rank):
    replica = Replica([(30, 40)], [1])
    replica.ranks = [rank]
    with pytest.raises(WRONG, match=rf"ranks\[0\] is {rank}; expected 1 to 30, the smaller dimen"):
        call(lambda: replica.left())()


def test_a_rank_of_an_empty_tensor(call):
    replica = Replica([(0, 40)], [0])
    replica.ranks = [1]
    with pytest.raises(WRONG, match=r"ranks\[0\] is 1; expected 1 to 0"):
        call(lambda: replica.left())()


def test_not_one_rank_per_tensor(call):
    replica = Replica([(30, 40)], [2])
    replica.ranks = [2, 2]
    with pytest.raises(WRONG, match="ranks has 2 entries; expected 1"):
        call(lambda: replica.left())()


def test_not_one_gradient_per_residual(call):
    replica = Replica([(30, 40)], [2])
    replica.gradients *= 2
    with pytest.raises(WRONG, match="2 gradients for 1 residuals"):
        call(lambda: replica.left())()


def test_a_gradient_of_another_shape(call):
    replica = Replica([(30, 40)], [2])
    replica.gradients = [tf.zeros([40, 30])]
    message = r"gradient 0 has shape \[40,30\]; expected \[30,40\]|Shapes are \[30,40\] and \[40"
    with pytest.raises(WRONG, match=message):
        call(lambda: replica.left())()


@pytest.mark.parametrize(
    ("rank", "shape"), [(2, [40]), (2, [2, 40]), (2, [40, 1]), (0, [2, 40]), (0, [1])]
)
def test_a_factor_of_another_shape(call, rank, shape):
    replica = Replica([(30, 40)], [rank])
    replica.factors = [tf.Variable(tf.zeros(shape))]
    with pytest.raises(WRONG, match=rf"factor 0 has shape .*; expected \[40,{rank}\], or more"):
        call(lambda: replica.left())()


def test_a_factor_that_is_not_float32(call):
    replica = Replica([(30, 40)], [2])
    replica.factors = [tf.Variable(tf.zeros([40, 2], tf.float16))]
    with pytest.raises(WRONG, match="factor 0 is a variable of half; expected float32"):
        call(lambda: replica.left())()


def test_a_factor_given_twice(call):
    replica = Replica([(30, 40), (30, 40)], [2, 2])
    replica.factors = replica.factors[:1] * 2
    with pytest.raises(WRONG, match="a residual or factor is given twice"):
        call(lambda: replica.left())()


def test_sums_of_another_size(call):
    replica = Replica([(30, 40)], [2])
    with pytest.raises(WRONG, match=r"left_sum has shape \[60\]; expected \[61\] for these"):
        call(lambda: replica.right(tf.zeros([60])))()
    left, right = tf.zeros([61]), tf.zeros([80])
    with pytest.raises(WRONG, match=r"left has shape \[60\]; expected \[61\]"):
        call(lambda: replica.reduce(left[1:], right, right))()
    with pytest.raises(WRONG, match=r"right has shape \[80,1\]; expected \[80\]"):
        call(lambda: replica.reduce(left, right[:, None], right))()
    with pytest.raises(WRONG, match=r"right_sum has shape \[81\]; expected \[80\]"):
        call(lambda: replica.reduce(left, right, tf.zeros([81])))()


class Alternating(Replica):
    """A replica whose factors have P above Q."""

    def __init__(self, shapes, ranks):
        super().__init__(shapes, ranks)
        self.factors = [
            tf.Variable(tf.zeros([np.prod(shape[:-1]) + shape[-1], rank] if rank else [0]))
            for shape, rank in zip(shapes, ranks, strict=True)
        ]

    @property
    def state(self):
        return self.residuals, self.gradients, self.factors, 0

    def project(self):
        return ops.power_sgd_project(*self.state, ranks=self.ranks)

    def reduce_projected(self, local, total, keep=True, finite=True):
        return ops.power_sgd_reduce_projected(
            *self.state, local, total, keep=keep, finite=finite, ranks=self.ranks
        )


def test_lengths_of_projections_depend_on_factors_and_are_known_in_no_graph():
    replica = Alternating([(30, 40), (7,)], [2, 0])

    @tf.function(autograph=False)
    def step():
        local, tensor_bytes, _ = replica.project()
        reduced, _ = replica.reduce_projected(local, local)
        assert local.shape.as_list() == [None]
        assert tensor_bytes.shape == [2]
        assert [tensor.shape for tensor in reduced] == [[30, 40], [7]]
        return tensor_bytes

    assert [step().numpy().tolist() for _ in range(3)] == [[240, 28], [320, 28], [240, 28]]


def test_wrong_arguments_of_projections_leave_the_variables_as_they_were(call):
    replica = Alternating([(30, 40)], [2])
    before = replica.residuals[0].numpy()
    local, *_ = replica.project()
    with pytest.raises(WRONG, match=r"local has shape \[60\]; expected \[61\] for these"):
        call(lambda: replica.reduce_projected(local[1:], local))()
    with pytest.raises(WRONG, match=r"total has shape \[62\]; expected \[61\]"):
        call(lambda: replica.reduce_projected(local, tf.zeros([62])))()
    with pytest.raises(WRONG, match=r"keep has shape \[1\]; expected a scalar"):
        call(lambda: replica.reduce_projected(local, local, keep=[True]))()
    assert_same_bits(replica.residuals[0].numpy(), before)
    replica.factors = [tf.Variable(tf.zeros([40, 2]))]
    with pytest.raises(WRONG, match=r"factor 0 has shape \[40,2\]; expected \[70,2\], or more"):
        call(lambda: replica.project())()


def test_decisions_that_are_no_scalars(call):
    replica = Replica([(30, 40)], [2])
    left, right = tf.zeros([61]), tf.zeros([80])
    with pytest.raises(WRONG, match=r"keep has shape \[1\]; expected a scalar"):
        call(lambda: replica.reduce(left, right, right, keep=[True]))()
    with pytest.raises(WRONG, match=r"finite has shape \[0\]; expected a scalar"):
        call(lambda: replica.reduce(left, right, right, finite=tf.zeros([0], tf.bool)))()
    with pytest.raises(WRONG, match=r"step has shape|Shape must be rank 0"):
        call(lambda: replica.left(step=[1]))()


def test_wrong_arguments_leave_the_variables_as_they_were():
    replica = Replica([(30, 40)], [2])
    before = replica.residuals[0].numpy()
    with pytest.raises(WRONG):
        replica.reduce(tf.zeros([61]), tf.zeros([80]), tf.zeros([81]))
    assert_same_bits(replica.residuals[0].numpy(), before)


PROGRAM = """
import hashlib, sys
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
from tests.ops.test_power_sgd import Replica
replica = Replica([(700, 1300), (400000, 9), (5, 70000), (300001,)], [4, 1, 3, 0])
for _ in range(2):
    reduced, _ = replica.step()
parts = [*reduced, *replica.residuals, *replica.factors]
print("digest", hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest())
"""


def test_results_do_not_depend_on_the_number_of_threads():
    digests = set()
    for threads in (1, 4):
        (worker,) = run_workers(PROGRAM, 1, [threads])
        digests.add(worker.stdout.split("digest ")[1])
    assert len(digests) == 1
