"""`DelayCheck` logs how alike residuals are to earlier ones, and warns where they stay so."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.delays import assert_cosines
from tests.workers import result, run_workers
from tf_gradcomp.keras.callbacks.compression_monitor import cosine

# Trains with `DelayCheck`, by a method that is slow to send and by one that sends at once.
PROGRAM = """
    import keras
    from tests.distributed.common import Setup, dense_model, digits

    from tests.delays import checked
    from tests.ranks import exchange_of, report

    BATCH, BATCHES, EVERY = 16, 10, 3


    def train(compressor):
        setup = Setup("optimizer", compressor)
        model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.SGD(0.01)))
        x, y = digits(BATCH * BATCHES)
        callbacks, found = checked(EVERY, exchange_of)
        model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=callbacks)
        return found()


    report({method: train(method) for method in ("random_k", "cast")})
"""
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
