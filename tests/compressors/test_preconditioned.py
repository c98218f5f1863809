"""Tests that each method with second moments equals the method on gradients divided before."""

import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import adam_bound, assert_close
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

    def step(self, step_index, gradients):
        inputs = []
        for rank, (gradients_here, state) in enumerate(zip(gradients, self.state, strict=True)):
            state_handles = handles(state)
            updates = tf.constant(step_index, tf.int64)
            moments = ADAM.second_moments(state_handles, updates, SIZE, gradients_here)
            if self.before:
                gradients_here, moments = ops.precondition(moments, gradients_here), None
            step_arguments = (
                tf.constant(step_index, tf.int64),
                tf.constant(True),
                rank,
                SIZE,
                moments,
            )
            job_state = self.job_state[rank]
            inputs.append(
                StepInputs(
                    self.specs, gradients_here, state_handles, *step_arguments, job_state=job_state
                )
            )
        has_stages = isinstance(self.compressor, Staged)
        method = self.compressor.stages[0] if has_stages else self.compressor
        return [end.result for end in in_lockstep(method, inputs)]

    def arrays(self, name):
        """Returns the tensors that each replica keeps by a name."""
        return [[v.numpy() for v in state.get(name, [])] for state in self.state]


def assert_same(compressor, steps=3):
    both = [Replicas(compressor, before) for before in (False, True)]
    for step in range(steps):
        gradients = random_gradients(SHAPES, SIZE, seed=step)
        first, second = (replicas.step(step, gradients) for replicas in both)
        for end, expected in zip(first, second, strict=True):
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
        assert_close(moment, 0.01 * gradient**2, adam_bound(0.99))
    assert not any(moment.any() for moment in bad)
