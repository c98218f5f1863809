"""Models that Keras cannot build from a batch train under the strategy by their own steps."""

import functools
from pathlib import Path

import numpy as np
import pytest

from tests.bounds import training
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "structures.py"


@functools.cache
def job(workers, way):
    return [result(worker) for worker in run_workers(PROGRAM, workers, [way])]


@pytest.mark.parametrize(
    "model",
    ["triple True", "triple False", "no call True", "no call False", "evaluated first"],
)
def test_workers_train_a_model_as_one_process(model):
    (plain,) = job(1, "plain")
    # Six steps of Adam(0.01, epsilon=0.1); sums are over 8 rows of a batch, and 5 and 8 inputs.
    bound = 10 * training(gain=0.1, terms=8 + 5 + 8, steps=6)
    for worker in job(2, "strategy"):
        np.testing.assert_allclose(worker[model], plain[model], rtol=0, atol=bound)
    assert abs(plain[model][-1] - plain[model][0]) > 4 * bound
