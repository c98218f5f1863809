"""Tests properties of QSGD alone; test_conformance has the others."""

import numpy as np
import pytest

from tests.compressors.lockstep import Lockstep, specs_of
from tests.reference import qsgd
from tf_gradcomp.compressors import QSGD
from tf_gradcomp.policy import LAYER_KINDS, GradientSpec


def spec(kind="dense", path="dense/kernel", shape=(30, 20)):
    return GradientSpec(path, shape, "float32", kind)


def step(compressor, gradients):
    """The outcome of the first step, from empty residuals."""
    return Lockstep(compressor, specs_of(gradients[0]), len(gradients)).step(gradients)


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def resnet18():
    """Kernels and vectors of a ResNet18 for small images of 100 classes: 11,220,132 parameters."""
    kernels, vectors = [(3, 3, 3, 64)], [64, 64]
    width = 64
    for stage, channels in enumerate((64, 128, 256, 512)):
        for block in range(2):
            kernels += [(3, 3, width, channels), (3, 3, channels, channels)]
            vectors += [channels] * 4
            if stage > 0 and block == 0:
                kernels.append((1, 1, width, channels))
                vectors += [channels] * 2
            width = channels
    return [*kernels, (512, 100)], [*vectors, 100]


def test_all_but_vectors_have_4_bits():
    bits = {kind: QSGD().bits.of(spec(kind)) for kind in LAYER_KINDS}
    assert bits == {
        "convolution": 4,
        "dense": 4,
        "recurrent": 4,
        "embedding": 4,
        "vector": None,
    }


def test_a_number_of_bits_excludes_vectors_and_overrides_include_them():
    assert QSGD(2).bits.of(spec("dense")) == 2
    assert QSGD(2).bits.of(spec("vector")) is None
    assert QSGD({"vector": 8}).bits.of(spec("vector")) == 8
    assert QSGD({"vector": 8}).bits.of(spec("dense")) == 4
    assert QSGD(2, overrides={"bias$": 5}).bits.of(spec("vector", "dense/bias")) == 5
    assert QSGD(None).bits.of(spec("dense")) is None


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_payload_ratio_is_the_papers(bits):
    """L-GreCo: bits N + 64 ceil(N / 1024) for a kernel, 32 N for a vector."""
    kernels, vectors = resnet18()
    elements = [int(np.prod(shape)) for shape in kernels]
    assert sum(elements) + sum(vectors) == 11_220_132
    counted = [bits * n + 64 * -(-n // 1024) for n in elements] + [32 * n for n in vectors]
    shapes = [*kernels, *[(n,) for n in vectors]]
    specs = [GradientSpec("a", shape, "float32", "dense") for shape in kernels]
    specs += [GradientSpec("a", (n,), "float32", "vector") for n in vectors]
    gradients = [np.zeros(shape, np.float32) for shape in shapes]
    outcome = Lockstep(QSGD(bits), specs, 1).step([gradients])
    padding = 8 * outcome.tensor_bytes[0] - counted
    assert (padding >= 0).all()
    assert (padding < 32).all()
    ratio = 32 * 11_220_132 / sum(counted)
    assert 4 * 11_220_132 / outcome.payloads[0].nbytes == pytest.approx(ratio, rel=1e-4)
    if bits == 4:
        assert round(ratio, 2) == 7.83


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_sent_values_are_within_a_unit(bits):
    gradient = normal((64, 1024))
    (reduced,) = step(QSGD(bits), [[gradient]]).reduced[0]
    unit = (gradient.max(axis=1) - gradient.min(axis=1)) / (2**bits - 1)
    errors = np.abs(reduced - gradient) / unit[:, None]
    assert 0.99 < errors.max() < 1 + 1e-4


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_stochastic_rounding_sends_each_element_on_average(bits):
    gradient = normal((1, 256))
    compressor = QSGD(bits)
    sent = np.zeros(gradient.shape)
    steps = 1000
    lockstep = Lockstep(compressor, specs_of([gradient]), 1, graph=True)
    for _ in range(steps):
        before = lockstep.state[0]["residual"][0]
        sent += lockstep.step([[gradient - before]]).reduced[0][
            0
        ]  # so that the sum is the gradient
    unit = (gradient.max() - gradient.min()) / (2**bits - 1)
    # A draw has a deviation of at most half a unit.
    assert np.abs(sent / steps - gradient).max() < 5 * 0.5 * unit / np.sqrt(steps)
    assert np.abs((sent / steps - gradient).mean()) < 5 * 0.5 * unit / np.sqrt(steps * 256)


def test_replicas_steps_and_variables_draw_different_numbers():
    gradient = normal((4, 64))

    def levels(outcome, replica=0, tensor=0):
        words = outcome.tensor_bytes[replica][0] // 4
        return tuple(outcome.payloads[replica][14 + tensor * words :][:words])

    lockstep = Lockstep(QSGD(), specs_of([gradient] * 2), 2)
    first = lockstep.step([[gradient] * 2] * 2)
    left = [of_one["residual"] for of_one in lockstep.state]
    rest = [[gradient - had for had in of_one] for of_one in left]
    second = lockstep.step(rest)
    drawn = {
        levels(first),
        levels(first, replica=1),
        levels(first, tensor=1),
        levels(second),
    }
    assert len(drawn) == 4
    assert levels(step(QSGD(), [[gradient] * 2] * 2)) == levels(first)


def test_offsets_are_numpys_philox_and_evenly_spread():
    offsets = qsgd.random_offsets(replica=1, tensor=2, step=2**40, size=2**20)
    assert 0 < offsets.min() < 1e-4
    assert 1 - 1e-4 < offsets.max() < 1
    counts = np.bincount((16 * offsets).astype(int), minlength=16)
    assert np.abs(counts - 2**16).max() < 5 * np.sqrt(2**16)
    np.testing.assert_array_equal(qsgd.random_offsets(1, 2, 2**40, 5), offsets[:5])


def test_values_beyond_the_limit_are_sent_over_several_steps():
    gradient = np.array([[3e38, -3e38, 0, 1]], np.float32)
    lockstep = Lockstep(QSGD(8), specs_of([gradient]), 1)
    (reduced,) = lockstep.step([[gradient]]).reduced[0]
    assert reduced[0, 0] == pytest.approx(2**126, rel=1e-5)
    sent = reduced.astype(np.float64)
    for _ in range(8):
        sent += lockstep.step([[np.zeros_like(gradient)]]).reduced[0][0]
    np.testing.assert_allclose(sent[0, :2], gradient[0, :2], rtol=1e-2)


def test_denormals_are_sent_and_kept():
    gradient = np.array([[1e-40, 0, 3e-41, -2e-41]], np.float32)
    outcome = step(QSGD(), [[gradient]])
    assert outcome.reduced[0][0].any()
    np.testing.assert_array_equal(outcome.reduced[0][0] + outcome.residuals[0][0], gradient)


def test_a_replica_that_is_not_finite_sends_as_many_words():
    good = [np.ones((40, 30), np.float32)]
    bad = [np.full((40, 30), np.nan, np.float32)]
    outcome = step(QSGD(), [good, bad])
    assert [payload.size for payload in outcome.payloads] == [14 + 2 * 2 + 150] * 2
    assert not outcome.payloads[1][14:].any()
