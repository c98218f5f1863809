"""Tests AdaComp's own settings; test_conformance.py tests the behaviour of all compressors."""

import numpy as np
import pytest

from tests.compressors.lockstep import Lockstep, specs_of
from tf_gradcomp.compressors import AdaComp
from tf_gradcomp.policy import LAYER_KINDS, GradientSpec


def spec(kind="dense", path="dense/kernel", shape=(30, 20)):
    return GradientSpec(path, shape, "float32", kind)


def test_default_bins_equal_the_papers():
    sizes = {kind: AdaComp().bin_sizes.of(spec(kind)) for kind in LAYER_KINDS}
    assert sizes == {
        "convolution": 50,
        "dense": 500,
        "recurrent": 500,
        "embedding": 500,
        "vector": 500,
    }


def test_overrides_reach_the_payload():
    gradient = [np.random.default_rng(0).normal(size=1000).astype(np.float32)]
    sizes = [
        Lockstep(compressor, specs_of(gradient), 1).step([gradient]).tensor_bytes[0][0]
        for compressor in (AdaComp(), AdaComp(overrides={"layer_0": None}))
    ]
    assert sizes[0] < 200
    assert sizes[1] == 8 + 4 * 1000


@pytest.mark.parametrize("size", [1, 63, 64, 16383])
def test_the_limits_of_a_bin_are_taken(size):
    gradients = [[np.random.default_rng(0).normal(size=40_000).astype(np.float32)]] * 2
    outcome = Lockstep(AdaComp(bin_sizes=size), specs_of(gradients[0]), 2).step(gradients)
    assert outcome.finite == [True, True]


def test_with_scale_factor_1_each_bin_sends_its_maximum():
    gradient = np.random.default_rng(0).normal(size=(10, 50)).astype(np.float32)
    outcome = Lockstep(AdaComp(50, 1.0), specs_of([gradient]), 1).step([[gradient]])
    sent = outcome.reduced[0][0] != 0
    assert (sent.sum(axis=1) == 1).all()
    assert (np.abs(gradient).argmax(axis=1) == sent.argmax(axis=1)).all()
