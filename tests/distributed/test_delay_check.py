"""`DelayCheck` logs how alike residuals are to earlier ones, and warns where they stay so."""

import math
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.delays import assert_cosines
from tests.workers import result, run_workers
from tf_gradcomp.keras.callbacks.compression_monitor import cosine

PROGRAM = Path(__file__).parent / "programs/delays.py"
EVERY = 3


@pytest.fixture(scope="module")
def workers():
    return run_workers(PROGRAM, 2)


def test_it_logs_the_cosine_of_each_worker_s_own_residuals(workers):
    for worker in workers:
        assert_cosines(result(worker)["random_k"], EVERY, checks=3)


def test_without_residuals_it_logs_nothing(workers):
    for worker in workers:
        assert set(result(worker)["cast"]["logged"]) == {None}


def test_the_chief_alone_warns_and_once(workers):
    logged = [
        (worker.stdout + worker.stderr).count("DelayCheck: much of the residual")
        for worker in workers
    ]
    assert logged == [1, 0]


def test_the_cosine_of_nothing_is_no_number():
    first, second = np.array([3.0, 0.0, 0.0]), np.array([3.0, 0.0, 4.0])
    assert math.isnan(cosine(np.zeros(0), first))
    assert cosine(first, second) == pytest.approx(0.6)
    assert cosine(second, -second) == pytest.approx(-1)
    assert math.isnan(cosine(second, np.zeros(3)))


def test_equal_gradients_wait_if_random_k_does_not_draw_them():
    """In a simulation: after 20 steps of density 0.01, most entries were never drawn."""
    model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(40, use_bias=False)])
    model.compile("sgd", loss=lambda _, output: tf.reduce_sum(output, -1))
    rows = np.ones((4, 50), np.float32)
    learners = gc.simulation.Learners(model, 2, "random_k")
    before, cosines = np.zeros(0), []
    for step in range(1, 41):
        learners.train_on_batch(rows, np.zeros((4, 40), np.float32))
        if step % 20 == 0:
            now = np.concatenate([np.ravel(residual) for residual in learners.residuals[0]])
            cosines.append(cosine(before, now))
            before = now
    assert cosines[1] > 0.9


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": "epoch"}], ids=repr)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"DelayCheck: .* received"):
        gc.callbacks.DelayCheck(**wrong)
