"""SIDCo's op: it chooses the entries that NumPy chooses, and refuses wrong densities."""

import numpy as np
import pytest
import tensorflow as tf

from tests.reference import sidco
from tf_gradcomp import ops

ELEMENTS = 150_000  # in three blocks of the kernel
SAMPLES = {
    "Laplace": lambda draw: draw.laplace(size=ELEMENTS),
    "Student": lambda draw: draw.standard_t(3, size=ELEMENTS),
    "many zeros": lambda draw: draw.gamma(0.2, size=ELEMENTS) * draw.integers(0, 2, ELEMENTS),
    "tiny": lambda draw: 1e-41 * draw.normal(size=ELEMENTS),  # denormals
    "one outlier": lambda draw: np.append(draw.normal(size=ELEMENTS), 1e30),
    "few": lambda draw: draw.normal(size=1023),
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_chooses_as_numpy_does(sample):
    values = SAMPLES[sample](np.random.default_rng(0)).astype(np.float32)
    for density in (0.5, 0.1, 0.001):
        expected = sidco.select(values, density)
        np.testing.assert_array_equal(ops.sidco_choose(values, density), expected)


@pytest.mark.parametrize("density", [0.0, 1.0, -0.1, np.nan])
def test_a_density_out_of_range_is_refused(density):
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected a number above 0 and below"):
        ops.sidco_choose(tf.ones(5), density)
