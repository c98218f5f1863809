"""Tests warm-ups: by another method, or by a gentler setting of the same method."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests.compressors.lockstep import Lockstep, assert_equal_bits, specs_of
from tests.compressors.methods import METHODS
from tests.compressors.test_conformance import every_class, random_gradients
from tf_gradcomp import compressors
from tf_gradcomp.compressors import AdaComp, Compressor
from tf_gradcomp.compressors.base import RESIDUAL, StepInputs
from tf_gradcomp.exchange.replica import ReplicaStep
from tf_gradcomp.exchange.state import handles, new_state, state_specs
from tf_gradcomp.groups.communicator import communicate
from tf_gradcomp.groups.lockstep import lockstep_communicators

SHAPES = [(40, 30), (3, 3, 7, 11), (5,)]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)


def after_warmup(compressor: Compressor, steps: int, warmup="no_compression") -> Compressor:
    config = {**compressor.get_config(), "warmup_steps": steps, "warmup": warmup}
    return type(compressor).from_config(config)


def outcomes(compressor, steps):
    lockstep = Lockstep(compressor, specs_of(random_gradients(SHAPES, 1)[0]), 2)
    return [lockstep.step(random_gradients(SHAPES, 2, seed=seed)) for seed in range(steps)]


@every_class
def test_the_first_steps_are_dense(method):
    dense = outcomes(compressors.NoCompression(), 2)
    warming = outcomes(after_warmup(method.compressor, 2), 3)
    for expected, actual in zip(dense, warming[:2], strict=True):
        for first, second in zip(actual.reduced[0], expected.reduced[0], strict=True):
            assert_equal_bits(first, second)
        assert not any(array.any() for arrays in actual.residuals for array in arrays)
        assert actual.payload_bytes == expected.payload_bytes
    after = warming[2].payload_bytes
    assert (after == dense[0].payload_bytes) == (method.compressor.name == "no_compression")


class WarmingUp:
    """Two replicas in a warm-up, with what an earlier job left in their residuals."""

    def __init__(self, warmup, left):
        self._compressor = AdaComp(warmup_steps=100, warmup=warmup)
        self._specs = specs_of([np.zeros((4, 5), np.float32)])
        self._state = [new_state(self._compressor, self._specs) for _ in range(2)]
        self._step = 0
        for replica in self._state:
            replica[RESIDUAL][0].assign(np.full((4, 5), left, np.float32))

    def step(self, values, *, finite=True):
        """With one value for each replica; returns the sum, and whether it counts."""
        steps = [
            ReplicaStep.new(
                StepInputs(
                    self._specs,
                    [tf.fill([4, 5], value)],
                    handles(state),
                    tf.constant(self._step, tf.int64),
                    tf.constant(finite),
                    rank,
                    2,
                )
            )
            for rank, (value, state) in enumerate(zip(values, self._state, strict=True))
        ]
        self._step += 1
        warmup = self._compressor.warmup
        reductions = [step.reduce_by(warmup) for step in steps]
        results, _ = communicate(reductions, lockstep_communicators(2))
        reduced = results[0].reduced
        return reduced.gradients[0].numpy(), bool(reduced.finite)

    @property
    def left(self):
        """Returns the residual of each replica."""
        return [np.unique(replica[RESIDUAL][0].numpy()).item() for replica in self._state]


@pytest.mark.parametrize(
    ("warmup", "left"), [("cast", 4e4), ("cast", 1e5), ("no_compression", 2.5e38)]
)
def test_residuals_whose_sum_is_too_large_cost_one_step(warmup, left):
    job = WarmingUp(warmup, left)
    total, finite = job.step([1.0, 2.0])
    assert not finite
    assert not total.any()
    assert job.left == [0, 0]
    for _ in range(3):
        total, finite = job.step([1.0, 2.0])
        assert finite
        assert (total == 3).all()


@pytest.mark.parametrize("warmup", ["cast", "no_compression"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_residual_stays_where_a_gradient_is_not_finite(warmup, bad):
    job = WarmingUp(warmup, 16.0)
    assert not job.step([1.0, bad])[1]
    assert job.left == [16, 16]
    assert not job.step([1.0, 2.0], finite=False)[1]
    assert job.left == [16, 16]
    total, finite = job.step([1.0, 2.0])
    assert finite
    assert (total == 35).all()
    assert job.left == [0, 0]


def test_a_warmup_may_have_its_own_warmup():
    schedule = AdaComp(500, warmup_steps=4, warmup=AdaComp(20, warmup_steps=2))
    sizes = [outcome.payload_bytes[0] for outcome in outcomes(schedule, 6)]
    assert sizes[0] == sizes[1] == 4 * sum(np.prod(shape) for shape in SHAPES)
    assert max(sizes[2:4]) < sizes[0]
    assert max(sizes[4:]) < min(sizes[2:4])


@every_method
def test_the_config_has_it(method):
    compressor = after_warmup(method.compressor, 3, {"name": "cast", "config": {}})
    description = json.loads(json.dumps(compressors.serialize(compressor)))
    copy = compressors.deserialize(description)
    assert copy.warmup_steps == 3
    assert copy.warmup.name == "cast"
    specs = specs_of(random_gradients(SHAPES, 1)[0])
    assert copy.fingerprint(specs) == compressor.fingerprint(specs)
    assert copy.fingerprint(specs) != method.compressor.fingerprint(specs)


def test_its_state_is_kept_as_well():
    specs = specs_of(random_gradients(SHAPES, 1)[0])
    state = state_specs([compressors.NoCompression(warmup_steps=3, warmup="adacomp")], specs)
    assert [spec.shape for spec in state["residual"]] == SHAPES
