"""The training loops of TensorFlow's guides on two workers, changed only in the strategy."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.bounds import training
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "tutorials.py"
# Tracing takes seconds, so not each guide is run in each way.
RUNS = {
    "unwrapped": ("CustomTraining eager", "StepsInAFunction graph"),
    "optimizer": ("CustomTraining eager", "LoopWithCheckpoints graph"),
    "strategy": ("CustomTraining graph", "LoopWithCheckpoints eager"),
    "alone": ("CustomTraining graph", "LoopWithCheckpoints graph", "StepsInAFunction graph"),
}
quick = pytest.mark.quick("compressor on the strategy", "custom training loop")
# Adam(0.001) has an epsilon of 0.05. A filter's gradient is a sum over 64 rows and 36 places; the
# model's sums are over 9 places of a filter, 72 inputs and 32 units.
SUMS = 9 + 72 + 32
TRAINED = training(gain=0.001 / 0.05, terms=64 * 36 + SUMS, steps=2 * 8)


@functools.cache
def seen(ways, workers=2):
    runs = [f"{way} {run}" for way in ways for run in RUNS[way]]
    with tempfile.TemporaryDirectory() as folder:
        jobs = run_workers(PROGRAM, workers, [",".join(runs), folder])
    return [result(worker) for worker in jobs]


@pytest.mark.parametrize(
    ("way", "run"),
    [
        *((way, run) for way in ("unwrapped", "optimizer") for run in RUNS[way]),
        *(pytest.param("strategy", run, marks=quick) for run in RUNS["strategy"]),
    ],
)
def test_two_workers_train_as_one_process_does(way, run):
    # A job runs both ways of a strategy without a compressor.
    ways = ("strategy",) if way == "strategy" else ("unwrapped", "optimizer")
    first, second = (worker[f"{way} {run}"] for worker in seen(ways))
    assert first == second
    (one,) = seen(("alone",), 1)
    expected = one[f"alone {run.split()[0]} graph"]
    assert first["iterations"] == expected["iterations"]
    # Metrics follow from outputs, and each output differs by its sums of weights.
    np.testing.assert_allclose(first["measured"], expected["measured"], rtol=SUMS * TRAINED)
    for weight, like in zip(first["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(weight, like, rtol=0, atol=TRAINED)
