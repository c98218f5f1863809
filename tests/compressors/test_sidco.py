"""Tests SIDCo's thresholds; test_conformance.py tests the behaviour of all compressors."""

import numpy as np
import pytest

from tests.compressors.lockstep import Lockstep, specs_of
from tf_gradcomp.compressors import SIDCo

ELEMENTS = 100_000


def like_residuals(draw):
    """Magnitudes without a tail: earlier steps have sent the entries above a threshold."""
    values = draw.laplace(size=4 * ELEMENTS)
    return values[np.abs(values) < 2][:ELEMENTS] + 0.1 * draw.normal(size=ELEMENTS)


SAMPLES = {
    "normal": lambda draw: draw.normal(size=ELEMENTS),
    "Laplace": lambda draw: draw.laplace(size=ELEMENTS),
    "gamma 0.5": lambda draw: draw.gamma(0.5, size=ELEMENTS),
    "gamma 0.2": lambda draw: draw.gamma(0.2, size=ELEMENTS),
    "Pareto 0.2": lambda draw: draw.pareto(5, size=ELEMENTS),
    "Pareto 0.4": lambda draw: draw.pareto(2.5, size=ELEMENTS),
    "Student": lambda draw: draw.standard_t(3, size=ELEMENTS),
    "log-normal": lambda draw: draw.lognormal(0, 1.5, size=ELEMENTS),
    "residuals": like_residuals,
    "four scales": lambda draw: draw.normal(size=ELEMENTS) * np.resize([0.01, 0.1, 1, 3], ELEMENTS),
}


def sent(compressor, *gradients):
    """Returns the number of entries that each replica sends of its gradient."""
    all_gradients = [[gradient.astype(np.float32)] for gradient in gradients]
    outcome = Lockstep(compressor, specs_of(all_gradients[0]), len(all_gradients)).step(
        all_gradients
    )
    return [(int(byte[0]) - 4) // 8 for byte in outcome.tensor_bytes]


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("name", SAMPLES)
def test_sends_about_the_share_that_is_asked_for(name, density):
    draws = [SAMPLES[name](np.random.default_rng(seed)) for seed in range(4)]
    share = np.mean(sent(SIDCo(density), *draws)) / ELEMENTS
    assert 0.95 <= share / density <= 1.05


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_the_scale_does_not_matter(scale):
    values = SAMPLES["Laplace"](np.random.default_rng(0)).astype(np.float32)
    scaled = values * np.float32(2.0 ** round(np.log2(scale)))
    first, other = sent(SIDCo(), values, scaled)
    assert first == other


def test_entries_that_are_0_do_not_count():
    values = np.zeros(ELEMENTS)
    values[:1000] = SAMPLES["Laplace"](np.random.default_rng(0))[:1000]
    assert 0.75 <= sent(SIDCo(0.001), values)[0] / 100 <= 1.25
    values[50:] = 0
    assert sent(SIDCo(0.001), values) == [50]


def test_of_equal_entries_twice_the_share_is_sent():
    """No threshold divides them."""
    assert sent(SIDCo(), np.ones(ELEMENTS)) == [200]
