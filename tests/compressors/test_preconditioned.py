"""Tests that each method with second moments equals the method on gradients divided before."""

import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import assert_close, of_adam
from tests.compressors.lockstep import assert_equal_bits, in_lockstep, specs_of
from tests.compressors.test_conformance import every_format, random_gradients
from tests.compressors.test_warmup import after_warmup
from tf_gradcomp import compressors, ops
from tf_gradcomp.adam.preconditioner import SECOND_MOMENT, Preconditioner
from tf_gradcomp.compressors import StepInputs
from tf_gradcomp.compressors.stages import Staged
from tf_gradcomp.exchange.state import handles, new_job_state, new_state

SHAPES = [(40, 30), (3, 3, 7, 11), (5,), (0, 3), ()]
SIZE = 2
ADAM = Preconditioner(beta_2=0.99, epsilon=1e-7)


class Replicas:
    """Replicas with second moments; `before`: whose gradients are divided before the exchange."""

    def __init__(self, compressor, before):
        self.compressor = compressor
        self.before = before
        self.specs = specs_of(random_gradients(SHAPES, 1)[0])
        self.state = [new_state(compressor, self.specs, ADAM) for _ in range(SIZE)]
        self.job_state = [new_job_state(compressor, self.specs) for _ in range(SIZE)]

    def step(self, number, gradients):
        inputs = []
        for rank, (given, state) in enumerate(zip(gradients, self.state, strict=True)):
            of_one = handles(state)
            updates = tf.constant(number, tf.int64)
            moments = ADAM.second_moments(of_one, updates, SIZE, given)
            if self.before:
                given, moments = ops.precondition(moments, given), None
            of_step = (tf.constant(number, tf.int64), tf.constant(True), rank, SIZE, moments)
            of_job = self.job_state[rank]
            inputs.append(StepInputs(self.specs, given, of_one, *of_step, job_state=of_job))
        has_stages = isinstance(self.compressor, Staged)
        method = self.compressor.stages[0] if has_stages else self.compressor
        return [end.result for end in in_lockstep(method, inputs)]

    def arrays(self, name):
        """Returns the tensors that each replica keeps by a name."""
        return [[v.numpy() for v in state.get(name, [])] for state in self.state]


def assert_same(compressor, steps=3):
    both = [Replicas(compressor, before) for before in (False, True)]
    for number in range(steps):
        gradients = random_gradients(SHAPES, SIZE, seed=number)
        one, other = (replicas.step(number, gradients) for replicas in both)
        for end, expected in zip(one, other, strict=True):
            assert bool(end.finite)
            for reduced, wanted in zip(end.gradients, expected.gradients, strict=True):
                assert_equal_bits(reduced.numpy(), wanted.numpy())
    for name in both[0].state[0]:
        for kept, wanted in zip(both[0].arrays(name), both[1].arrays(name), strict=True):
            for array, expected in zip(kept, wanted, strict=True):
                assert_equal_bits(array, expected)


@every_format
def test_each_payload_format(method):
    assert_same(method.compressor)


@pytest.mark.parametrize("names", [("adacomp", "scalecom"), ("scalecom", "adacomp")], ids=str)
def test_a_method_that_divides_before_or_after_one_that_does_not(names):
    compressor, warmup = (compressors.get(name) for name in names)
    assert_same(after_warmup(compressor, 2, compressors.serialize(warmup)), steps=4)


@pytest.mark.parametrize("name", ["adacomp", "scalecom"])
def test_a_step_that_is_skipped_updates_the_second_moments_of_good_gradients_only(name):
    replicas = Replicas(compressors.get(name), before=False)
    gradients = random_gradients(SHAPES, SIZE)
    gradients[1][0][3, 4] = np.nan
    for end in replicas.step(0, gradients):
        assert not bool(end.finite)
    good, bad = replicas.arrays(SECOND_MOMENT)
    for moment, gradient in zip(good, gradients[0], strict=True):
        assert_close(moment, 0.01 * gradient**2, of_adam(0.99))
    assert not any(moment.any() for moment in bad)
