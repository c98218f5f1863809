"""Every method may begin with another one, or with a gentler setting of its own."""

import json

import numpy as np
import pytest

from tests.compressors.lockstep import Lockstep, assert_equal_bits, specs_of
from tests.compressors.methods import METHODS
from tests.compressors.test_conformance import random_gradients
from tf_gradcomp import compressors
from tf_gradcomp.compressors import AdaComp, Compressor
from tf_gradcomp.distribute.state import state_specs

SHAPES = [(40, 30), (3, 3, 7, 11), (5,)]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)


def after_warmup(compressor: Compressor, steps: int, warmup="no_compression") -> Compressor:
    config = {**compressor.get_config(), "warmup_steps": steps, "warmup": warmup}
    return type(compressor).from_config(config)


def outcomes(compressor, steps):
    lockstep = Lockstep(compressor, specs_of(random_gradients(SHAPES, 1)[0]), 2)
    return [lockstep.step(random_gradients(SHAPES, 2, seed=seed)) for seed in range(steps)]


@every_method
def test_the_first_steps_are_dense(method):
    dense = outcomes(compressors.NoCompression(), 2)
    warming = outcomes(after_warmup(method.compressor, 2), 3)
    for expected, actual in zip(dense, warming[:2], strict=True):
        for one, other in zip(actual.reduced[0], expected.reduced[0], strict=True):
            assert_equal_bits(one, other)
        assert not any(array.any() for arrays in actual.residuals for array in arrays)
        assert actual.payload_bytes == expected.payload_bytes
    after = warming[2].payload_bytes
    assert (after == dense[0].payload_bytes) == (method.compressor.name == "no_compression")


def test_a_warmup_may_have_one_of_its_own():
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
    assert [of_one.shape for of_one in state["residual"]] == SHAPES


@pytest.mark.parametrize("steps", [-1, 2.0, "3", None, True], ids=repr)
def test_numbers_of_steps_that_are_none(steps):
    with pytest.raises(ValueError, match="AdaComp: warmup_steps must be a whole number, 0 or more"):
        AdaComp(warmup_steps=steps)


def test_an_unknown_warmup_is_refused():
    with pytest.raises(ValueError, match="unknown name 'gentle'"):
        AdaComp(warmup_steps=3, warmup="gentle")
