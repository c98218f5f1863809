"""The training loops of TensorFlow's guides on two workers, changed only in the strategy."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "tutorials.py"
# Tracing takes seconds, so not each guide is run in each way.
UNCHANGED = "CustomTraining graph", "CustomTraining eager", "LoopWithCheckpoints eager"
RUNS = {
    "unwrapped": (*UNCHANGED, "StepsInAFunction graph"),
    "optimizer": ("CustomTraining eager", "LoopWithCheckpoints graph"),
    "strategy": ("CustomTraining graph", "LoopWithCheckpoints eager"),
    "alone": ("CustomTraining graph", "LoopWithCheckpoints graph", "StepsInAFunction graph"),
}
quick = pytest.mark.quick("compressor on the strategy", "custom training loop")
# A sum over the 64 rows and 36 places of a filter may round in each term, and does so in 16 steps.
ROUNDING = 16 * 64 * 36 * 2.0**-24


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
    # One job has both ways of a strategy without a compressor.
    ways = ("strategy",) if way == "strategy" else ("unwrapped", "optimizer")
    first, second = (worker[f"{way} {run}"] for worker in seen(ways))
    assert first == second
    (one,) = seen(("alone",), 1)
    expected = one[f"alone {run.split()[0]} graph"]
    assert first["iterations"] == expected["iterations"]
    np.testing.assert_allclose(first["measured"], expected["measured"], rtol=ROUNDING)
    for weight, like in zip(first["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(weight, like, atol=ROUNDING * np.abs(like).max())
