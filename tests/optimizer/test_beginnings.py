"""Second moments begin with the replicas' own gradients, not with what an exchange gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import adam_bound, rounding
from tests.replicas import copies, mirrored, names_without_stages, stepper

METHODS = [
    name for name in names_without_stages() if name != "lgreco"
]  # one of the others, planned
DENSE = (20, 15)
ROWS = 40


class Job:
    """Two replicas that train a kernel, a vector of two elements and a table."""

    def __init__(self, method, **adam):
        self.strategy = mirrored()
        with self.strategy.scope():
            self.variables = [
                keras.Variable(np.zeros(shape, "float32"), name=name)
                for name, shape in (("kernel", DENSE), ("bias", (2,)), ("embeddings", (ROWS, 4)))
            ]
            inner = keras.optimizers.Adam(0.01, **adam)
            self.optimizer = gc.CompressedOptimizer(inner, method, precondition="local")
            self.optimizer.build(self.variables)
        self._step = stepper(self.strategy, self._apply, graph=True)

    def _apply(self, given):
        kernel, bias, values, indices = given
        slices = tf.IndexedSlices(values, indices, tf.constant([ROWS, 4], tf.int64))
        self.optimizer.apply([kernel, bias, slices], self.variables)

    def step(self, number, *, bias=(0, 0), table=(0, 0), bad=()):
        """Takes a step; `bias` and `table` are the sizes of each replica's gradients."""
        kernels = np.random.default_rng(number).normal(size=(2, *DENSE)).astype("float32")
        kernels[list(bad), 0, 0] = np.nan
        rows = np.arange(3)  # of gradients of zeros is the first, too
        self._step(
            [
                [
                    kernels[replica],
                    np.full(2, bias[replica], "float32"),
                    np.array([[0], [0], [table[replica]]], "float32") * np.ones(4, "float32"),
                    rows,
                ]
                for replica in range(2)
            ]
        )

    def since(self):
        since = self.optimizer.exchange.facts.moments_since
        first, second = copies(self.strategy, since)
        np.testing.assert_array_equal(first, second)
        return first.tolist()


def keeps_slices(method):
    return gc.compressors.get(method).slices_dtype is not None


@pytest.mark.parametrize("method", METHODS)
def test_they_begin_with_the_first_gradient_of_any_replica(method):
    """One replica has only gradients of the bias, the other only gradients of the table."""
    job = Job(method)
    table = 0 if keeps_slices(method) else 2  # else it is never divided
    for step in range(2):
        job.step(step)
    assert job.since() == [0, 2, table]
    job.step(2, bias=(0, 1e-30))
    assert job.since() == [0, 2, table and 3]
    job.step(3, bias=(0, 1), table=(1, 0), bad=[1])  # is skipped
    assert job.since() == [0, 2, table and 3]
    job.step(4, table=(1, 0))
    for step in range(5, 8):
        job.step(step)
    assert job.since() == [0, 2, table and 3]


def test_a_round_of_accumulation_begins_with_any_of_its_gradients():
    job = Job("scalecom", gradient_accumulation_steps=2)
    for step in range(4):
        job.step(step)
    job.step(4, bias=(1, 0))
    job.step(5)
    for step in range(6, 9):
        job.step(step, table=(0, 1))
    assert job.since() == [0, 2, 3]


@pytest.mark.parametrize("method", ["scalecom(rates=25)", "random_k(density=0.04)"])
def test_a_small_vector_moves_as_far_as_in_adam(method):
    """All gradients are 1 or -1, so each replica divides them to 1 / sqrt(2) of their signs."""
    strategy = mirrored()
    shapes = {"large": 223, "small": 2}  # with 23 elements in a chunk, if it could span variables
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros(n, "float32"), name=path) for path, n in shapes.items()
        ]
        optimizer = gc.CompressedOptimizer(
            keras.optimizers.Adam(0.01), method, precondition="local"
        )
        optimizer.build(variables)
    step = stepper(strategy, lambda gradients: optimizer.apply(gradients, variables), graph=True)
    large = np.where(np.arange(223) % 2, 1, -1).astype("float32")
    for _ in range(60):
        step([[large, np.ones(2, "float32")]] * 2)
    for variable, residual, sign in zip(
        variables, optimizer.exchange.residuals, (large, np.ones(2)), strict=True
    ):
        left = sum(copies(strategy, residual))
        # The root of the second moment, 2, is larger by epsilon. Each step rounds the sums.
        total = sign * 60 * np.sqrt(2)
        bound = rounding(60 * np.sqrt(2), terms=4, steps=60) + rounding(
            np.sqrt(2), adam_bound(), 60
        )
        applied = -variable.numpy() / 0.01 + left
        np.testing.assert_allclose(applied, total, rtol=0, atol=bound + 60 * 1e-7)
    assert (variables[1].numpy() <= -0.6).all()  # Adam's own step is 0.01 each time
