"""Settings that change between steps, between real workers."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.compressors.lockstep import Lockstep
from tests.workers import result, run_workers
from tf_gradcomp import compressors
from tf_gradcomp.policy import GradientSpec

PROGRAM = Path(__file__).parent / "programs" / "plans.py"
SHAPES = [(60, 80), (50,), (33,)]
CHUNKS = [[40, 25, 25], [7, 3, 5], [1, 1, 1], [400, 2, 2], [40, 25, 24]]
PLANS = {
    "power_sgd(rank=6)": [[4, 0, 0], [2, 0, 0], [0, 0, 0], [6, 0, 0], [5, 0, 0]],
    "scalecom": CHUNKS,
    "scalecom(value_bits=8)": CHUNKS,
    "scalecom(value_bits=16)": CHUNKS,
    "random_k": CHUNKS,
    "adacomp": [[50, 7, 0], [500, 0, 3], [0, 0, 0], [1, 64, 63], [50, 7, 0]],
    "qsgd": [[4, 0, 0], [8, 2, 3], [0, 0, 0], [2, 5, 0], [4, 0, 0]],
    "top_k": [[40, 5, 0], [1, 0, 3], [0, 0, 0], [4800, 9, 9], [40, 5, 0]],
}


@pytest.fixture(scope="module")
def workers():
    return [result(worker) for worker in run_workers(PROGRAM, 2, [json.dumps([SHAPES, PLANS])])]


@pytest.mark.parametrize("text", PLANS)
def test_workers_that_change_plans_reduce_as_replicas_in_one_process_do(workers, text):
    kinds = ["dense", "vector", "vector"]
    specs = [
        GradientSpec(f"layer_{i}", shape, "float32", kind)
        for i, (shape, kind) in enumerate(zip(SHAPES, kinds, strict=True))
    ]
    settings = tf.Variable(PLANS[text][0], dtype=tf.int64)
    lockstep = Lockstep(compressors.get(text), specs, 2, settings=settings)
    generators = [np.random.default_rng(rank) for rank in range(2)]
    first, second = (worker[text] for worker in workers)
    assert first == second
    assert first["traces"] == 1
    for plan, reduced in zip(PLANS[text], first["reduced"], strict=True):
        settings.assign(plan)
        outcome = lockstep.step(
            [[g.normal(size=shape).astype(np.float32) for shape in SHAPES] for g in generators]
        )
        for actual, expected in zip(reduced, outcome.reduced[0], strict=True):
            np.testing.assert_array_equal(np.float32(actual), expected)
