"""Tests properties of Cast alone; test_conformance has the others."""

import numpy as np
import pytest

from tests.compressors.lockstep import Lockstep, specs_of
from tf_gradcomp.compressors import Cast


@pytest.mark.parametrize(("dtype", "finite"), [("float16", False), ("bfloat16", True)])
def test_a_sum_beyond_the_largest_float16_skips_the_step(dtype, finite):
    gradients = [[np.array([40_000.0, 1.0], np.float32)]] * 2
    outcome = Lockstep(Cast(dtype), specs_of(gradients[0]), 2).step(gradients)
    assert outcome.finite == [finite] * 2
    assert outcome.reduced[0][0].any() == finite
