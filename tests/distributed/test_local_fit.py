"""Tests `fit` with local steps: all observers see equal models on all workers."""

from pathlib import Path

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "local_fit.py"
EPOCHS, STEPS = 2, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="module")
def jobs(folder):
    return [result(worker) for worker in run_workers(PROGRAM, 2, [folder])]


def test_workers_differ_within_rounds_and_agree_after_each_epoch(jobs):
    first, second = (job["in_fit"] for job in jobs)
    # The first step is synchronous, then rounds begin; the checkpoint of step 7 ends one early.
    equal = [one == other for one, other in zip(first["steps"], second["steps"], strict=True)]
    assert equal == [True, False, False, True, False, False, True, False, False, True]
    assert first["epochs"] == second["epochs"]  # also of the statistics of BatchNormalization
    assert first["validated"] == second["validated"]
    assert first["values"] == second["values"]
    assert first["weights"] == second["weights"]


def test_rounds_are_counted_and_logged(jobs):
    for job in jobs:
        seen = job["in_fit"]
        # 1 synchronous step; rounds of 3 and 1 steps; then of 2 until the save, and of 3.
        assert seen["logs"]["rounds"] == [2, 4]
        assert seen["exchanges"] == 1 + 4
        assert seen["iterations"] == EPOCHS * STEPS
        assert all(0 < drift < 1 for drift in seen["logs"]["drift"])
        assert seen["logs"]["drift"] == jobs[0]["in_fit"]["logs"]["drift"]  # a mean over workers
        assert all(ratio > 1 for ratio in seen["logs"]["compression_ratio"])


def test_logs_of_a_step_come_from_the_latest_exchange(jobs):
    first, second = (job["in_fit"]["losses"] for job in jobs)
    assert first == second
    # Exchanges are in steps 1, 4 and 10; those after steps 5 and 7 are seen in the next step.
    latest = [1, 1, 1, 4, 4, 6, 6, 8, 8, 10]
    assert first == [first[step - 1] for step in latest]
    assert len(set(first)) == len(set(latest))
    assert first[-1] == pytest.approx(jobs[0]["in_fit"]["logs"]["loss"][-1], rel=1e-6)


def test_a_worker_that_traces_its_step_alone_does_not_wait(jobs):
    first, second = (job["on_batches"] for job in jobs)
    assert first == second
    latest = [1, 1, 1, 4, 4, 4, 7, 7]  # steps with an exchange
    assert first == [first[step - 1] for step in latest]


def test_restored_best_weights_are_the_validated_weights(jobs):
    for job in jobs:
        seen = job["in_fit"]
        assert seen["evaluated"][0] == pytest.approx(min(seen["validated"]), rel=1e-5)


def test_statistics_are_averaged_before_each_save_and_after_a_reload(jobs):
    first, second = (job["statistics"] for job in jobs)
    assert first == second
    assert first[0] == first[1]


def test_workers_resume_alike_from_a_checkpoint_within_an_epoch(jobs):
    first, second = (job["resumed"] for job in jobs)
    assert first == second
    assert first["iterations"] == 7
    assert any(np.any(one) for one in first["momentum"])
    assert any(np.any(one) for one in first["residuals"])


def test_one_process_resumes_with_what_workers_have_not_sent(jobs, folder):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(3),
        ]
    )
    inner = keras.optimizers.Adam(0.01)
    model.compile(gc.CompressedOptimizer(inner, "top_k(density=0.2)", local_steps=3), loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.load_weights(folder / "model.weights.h5")
    inner.learning_rate = 0.0
    model.optimizer.apply([np.zeros(v.shape, "float32") for v in model.trainable_variables])
    trained = [i for i, v in enumerate(model.variables) if v.trainable]
    saved, waits = jobs[0]["resumed"]["values"], jobs[0]["resumed"]["residuals"]
    for i, waiting_value in zip(trained, waits, strict=True):
        expected = np.float32(saved[i]) - np.float32(waiting_value)
        np.testing.assert_array_equal(np.asarray(model.variables[i]), expected)


def test_several_steps_in_an_execution_are_steps_of_a_round(jobs):
    for job in jobs:
        by_step, by_four = job["per_execution"]
        assert by_step == by_four == jobs[0]["per_execution"][0]
