"""Gradients that come as slices go to the inner optimizer as slices."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close
from tests.optimizer.cases import OPTIMIZERS, copy_of, label
from tests.replicas import collective, copies, mirrored, names_without_stages, stepper
from tf_gradcomp.exchange.sparse import check_rows
from tf_gradcomp.policy import GradientSpec

ROWS, WIDTH = 40, 4


@keras.saving.register_keras_serializable()
class Recording(keras.optimizers.SGD):
    """Notes which rows it is given."""

    def update_step(self, gradient, variable, learning_rate):
        assert isinstance(gradient, tf.IndexedSlices)
        self.rows = gradient.indices.numpy()
        super().update_step(gradient, variable, learning_rate)


def slices_at(step, replicas):
    """Returns `[values, indices]` of each replica; rows come twice in one, and in several.

    Values are multiples of 1/64, so that their sums are exact in any order.
    """
    generator = np.random.default_rng(step)
    return [
        [
            np.round(64 * generator.normal(size=(6, WIDTH)).astype("float32")) / 64,
            generator.choice(ROWS // 2, 6).astype("int32"),
        ]
        for _ in range(replicas)
    ]


def table():
    values = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    return keras.Variable(values, name="embeddings")


def slices(values, indices):
    return tf.IndexedSlices(values, indices, tf.constant([ROWS, WIDTH]))


class Job:
    """A compressed optimizer of one table."""

    def __init__(self, replicas, inner, compressor="adacomp", graph=False, **kwargs):
        self.strategy = mirrored(replicas)
        with self.strategy.scope():
            self.table = table()
            self.optimizer = gc.CompressedOptimizer(copy_of(inner), compressor, **kwargs)
            self.optimizer.build([self.table])
        self.step = stepper(
            self.strategy,
            lambda given: self.optimizer.apply([slices(*given)], [self.table]),
            graph=graph,
        )


@pytest.mark.parametrize("inner", OPTIMIZERS, ids=label)
def test_no_compression_equals_one_process(inner):
    job, single, weights = Job(2, inner, "no_compression", graph=True), copy_of(inner), table()
    for step in range(8):
        given = slices_at(step, 2)
        job.step(given)
        values, indices = (np.concatenate(part) for part in zip(*given, strict=True))
        single.apply([slices(values, indices)], [weights])
    # The optimizer gets the same numbers, so only its own operations round.
    assert_close(job.table.numpy(), weights.numpy(), terms=16, steps=8)


@pytest.mark.parametrize("most", [2**26, 10], ids=["gathered", "too large"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_casts_train_as_one_process_but_for_rounding(dtype, most):
    """Adam squares slices one by one: had rows been summed before, its steps would be shorter."""
    inner, method = keras.optimizers.Adam(0.01), gc.compressors.Cast(dtype)
    policy = gc.Policy(max_dense_elements=most)
    job = Job(2, inner, method, graph=True, policy=policy)
    single, weights = copy_of(inner), table()
    start = weights.numpy()
    for step in range(8):
        given = slices_at(step, 2)
        given[0][1][:] = given[0][1][0]
        job.step(given)
        values, indices = (np.concatenate(part) for part in zip(*given, strict=True))
        single.apply([slices(values, indices)], [weights])
    # A step of Adam changes at most in proportion to gradients, so relatively by their rounding.
    moved = np.abs(weights.numpy() - start).max()
    assert_close(job.table, weights, steps=8, scale=moved, dtype=dtype)
    sent = job.optimizer.exchange.traffic().tensor_bytes["embeddings"]
    assert sent == 8 * 6 * (4 + 2 * WIDTH)  # an index and 16-bit values for each slice


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e9, 1e30])
def test_slices_that_float16_cannot_hold_are_cast_as_precisely_as_others(scale):
    """A slice belongs to one token, and in a large batch of many replicas it is often this
    small."""
    job = Job(2, keras.optimizers.SGD(1 / scale), "cast")
    start = job.table.numpy()
    given = slices_at(0, 2)
    job.step([[(values * scale).astype("float32"), indices] for values, indices in given])
    expected = start.copy()
    for values, indices in given:
        np.subtract.at(expected, indices, values)
    moved = np.abs(expected - start).max()
    assert_close(job.table, expected, terms=2, scale=moved, dtype="float16")


def test_a_slice_that_16_bits_cannot_hold_is_skipped_by_all():
    job = Job(2, keras.optimizers.SGD(1.0), "cast")
    start = job.table.numpy()
    given = slices_at(0, 2)
    given[1][0][3, 1] = 3.4e38  # finite as float32
    job.step(given)
    np.testing.assert_array_equal(job.table.numpy(), start)
    assert job.optimizer.exchange.skipped_steps.numpy() == 1
    job.step(slices_at(1, 2))
    for copy in copies(job.strategy, job.table):
        np.testing.assert_array_equal(copy, job.table.numpy())
        assert (copy != start).any()


@pytest.mark.parametrize(
    "inner", [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)], ids=label
)
@pytest.mark.parametrize("compressor", ["adacomp", "scalecom(rates=8)", "qsgd", "power_sgd"])
def test_replicas_stay_equal_and_train(inner, compressor):
    job = Job(2, inner, compressor)
    start = job.table.numpy()
    for step in range(4):
        job.step(slices_at(step, 2))
    first, second = copies(job.strategy, job.table)
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first).all()
    assert (first != start).any()


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("compressor", ["adacomp(bin_sizes=10)", "scalecom(rates=8)", "top_k"])
def test_the_inner_optimizer_gets_rows_that_were_touched_or_sent(compressor, replicas):
    job = Job(replicas, Recording(1.0), compressor)
    given = slices_at(0, replicas)
    job.step(given)
    inner = job.optimizer.inner_optimizer
    touched = np.unique(np.concatenate([indices for _, indices in given]))
    np.testing.assert_array_equal(inner.rows, touched)
    # Residuals of rows that no replica touches now may still be sent.
    row = np.setdiff1d(np.arange(ROWS), touched)[:1].astype("int32")
    before = job.table.numpy()
    job.step([[np.ones((1, WIDTH), "float32"), row]] * replicas)
    moved = np.flatnonzero((job.table.numpy() != before).any(1))
    np.testing.assert_array_equal(inner.rows, np.union1d(moved, row))


@pytest.mark.parametrize("method", names_without_stages())
def test_rows_that_never_have_a_gradient_stay(method):
    job = Job(2, keras.optimizers.Adam(0.01), method)
    start = job.table.numpy()[ROWS // 2 :]
    for step in range(4):
        job.step(slices_at(step, 2))
    moved = (job.table.numpy()[ROWS // 2 :] != start).any()
    assert moved == (method in ("qsgd", "sign_sgd"))  # as their docstrings say: no level is at 0


@pytest.mark.parametrize("compressor", ["adacomp", "no_compression"])
def test_loss_scales_are_undone_in_slices(compressor):
    plain = Job(2, keras.optimizers.SGD(0.1), compressor)
    scaled = Job(2, keras.optimizers.SGD(0.1, loss_scale_factor=64.0), compressor)
    given = slices_at(0, 2)
    plain.step(given)
    scaled.step([[64 * values, indices] for values, indices in given])
    np.testing.assert_array_equal(scaled.table.numpy(), plain.table.numpy())


@pytest.mark.parametrize("most", [2**26, 10], ids=["by method", "too large"])
@pytest.mark.parametrize("shape", [None, (ROWS, WIDTH)], ids=["none", "tuple"])
def test_slices_may_be_given_without_a_shape_or_with_a_tuple(shape, most):
    """As TensorFlow allows: of an embedding's own gradient the shape is a tensor."""
    policy = gc.Policy(max_dense_elements=most)
    job, other = (Job(2, keras.optimizers.Adam(0.01), policy=policy) for _ in range(2))

    def apply(given):
        values, indices = given
        other.optimizer.apply([tf.IndexedSlices(values, indices, shape)], [other.table])

    step = stepper(other.strategy, apply, graph=True)
    for index in range(4):
        given = slices_at(index, 2)
        job.step(given)
        step(given)
    np.testing.assert_array_equal(other.table.numpy(), job.table.numpy())


def test_a_table_that_is_touched_all_over_is_summed_dense():
    """As for an embedding that is also the output layer; gathering the table would cost more."""
    strategy = collective()
    with strategy.scope():
        weights = table()
        optimizer = gc.CompressedOptimizer(
            keras.optimizers.SGD(1.0), policy=gc.Policy(max_dense_elements=10)
        )
        optimizer.build([weights])
    step = stepper(strategy, lambda given: optimizer.apply([slices(*given)], [weights]), graph=True)
    start = weights.numpy()
    whole = np.arange(2 * ROWS, dtype="int32") % ROWS
    step([[np.ones((2 * ROWS, WIDTH), "float32"), whole]] * 2)
    assert_close(weights.numpy(), start - 4, terms=4)
    sent = optimizer.exchange.traffic().sent_bytes
    assert sent == 4 * ROWS * WIDTH + 8  # once each way, and a vote with a tag
    step([[np.ones((1, WIDTH), "float32"), whole[:1]]] * 2)
    assert optimizer.exchange.traffic().sent_bytes - sent < 100


def test_a_table_with_rows_beyond_int32_is_refused():
    check_rows([GradientSpec("small", (2**31 - 1, 4), "float32", "embedding")])
    with pytest.raises(ValueError, match="words has 2147483648 rows"):
        check_rows([GradientSpec("words", (2**31, 4), "float32", "embedding")])
