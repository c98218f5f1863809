"""Tests the choice of the replica that leads a step of ScaleCom and LGC."""

import numpy as np
import pytest
import tensorflow as tf

from tests.compressors.lockstep import Lockstep
from tests.reference.leader import leader as of_reference
from tf_gradcomp.compressors import LGC, ScaleCom
from tf_gradcomp.compressors.aggregation import leader
from tf_gradcomp.policy import GradientSpec

SIZES = [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("size", [1, *SIZES, 64])
def test_the_op_equals_the_reference_up_to_the_last_step(size):
    lead = tf.function(lambda step: leader(step, size), autograph=False)
    for step in (*range(30), 10**6 + 7, 2**31 - 1, 2**31, 3**39, 2**63 - 1):
        assert lead(tf.constant(step, tf.int64)) == of_reference(step, size)


@pytest.mark.parametrize("size", SIZES)
def test_each_replica_leads_once_in_so_many_steps(size):
    for first in range(0, size**3, size):
        leaders = [of_reference(step, size) for step in range(first, first + size)]
        assert sorted(leaders) == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_all_lead_about_equally_often_in_steps_at_any_fixed_interval(size):
    for distance in range(1, 2 * size + 1):
        for first in range(distance):
            steps = range(first, first + 60 * size * distance, distance)
            leaders = [of_reference(step, size) for step in steps]
            assert set(leaders[: 10 * size]) == set(range(size))
            assert min(np.bincount(leaders)) >= 30


@pytest.mark.parametrize(
    "compressor", [ScaleCom(10), LGC(density=0.1, warmup_steps=0)], ids=["ScaleCom", "LGC"]
)
def test_with_two_sets_in_turn_what_one_replica_alone_has_is_applied(compressor):
    """Steps of a set are two apart, as many as there are replicas."""
    generator = np.random.default_rng(0)
    lockstep = Lockstep(compressor, [GradientSpec("a", (64, 64), "float32", "dense")], 2)
    applied = 0.0
    for _ in range(100):
        gradients = [[generator.normal(size=(64, 64)).astype(np.float32)] for _ in range(2)]
        gradients[0][0][3, 5], gradients[1][0][3, 5] = 0, 0.5
        outcome = lockstep.step(gradients)
        applied += outcome.reduced[0][0][3, 5]
        lockstep.skip_a_step()
    assert applied + outcome.residuals[1][0][3, 5] == pytest.approx(50)
    assert applied > 40
