"""Each replica draws its own random numbers, from seeds that all workers share."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.bounds import training
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "random_numbers.py"
KEEP, ROWS = 0.75, 8
KINDS = [
    *("Dropout", "layer from outside", "GaussianNoise", "LSTM", "RandomFlip", "RandomRotation"),
    *("SeedGenerator", "keras.random without a seed"),
    *("tf.random.normal", "tf.random.uniform with a seed", "a nested tf.function"),
    *("tf.nn.dropout", "tf.image"),
]


@functools.cache
def job(workers, way="strategy", run=0):
    """Returns what each worker drew, the same in each `run`."""
    with tempfile.TemporaryDirectory() as folder:
        return [result(worker) for worker in run_workers(PROGRAM, workers, [way, folder])]


def test_there_is_a_test_for_each_kind():
    assert set(job(2)[0]["drawn"]) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_draw_their_own_numbers(kind):
    first, second = (worker["drawn"][kind] for worker in job(2))
    for one, other in zip(first, second, strict=True):
        assert one != other
    assert first[0] != first[1]  # from step to step


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_replica_draws_what_one_process_draws(kind):
    (plain,) = job(1, "plain")
    assert job(2)[0]["drawn"][kind] == plain["drawn"][kind]


def test_one_worker_draws_and_trains_as_a_process_without_a_strategy():
    (worker,), (plain,) = job(1), job(1, "plain")
    assert worker["drawn"] == plain["drawn"]
    assert worker["batches"] == plain["batches"]
    assert worker["fit"] == plain["fit"]


def test_workers_share_the_states_of_generators_and_all_weights():
    first, second = job(2)
    assert first["states"] == second["states"]
    assert first["fit"] == second["fit"]
    (plain,) = job(1, "plain")
    assert first["fit"]["initial"] == plain["fit"]["initial"]


def test_the_same_seed_repeats_a_job():
    assert job(2, run=1) == job(2)


def test_a_resumed_job_continues_the_sequence():
    for worker in job(2):
        assert worker["resumed"]["trained"] == worker["fit"]["trained"]


def test_data_that_workers_share_are_augmented_as_in_one_process():
    (plain,) = job(1, "plain")
    workers = [worker["batches"]["shared"] for worker in job(2)]
    for parts in zip(*workers, plain["batches"]["shared"], strict=True):
        np.testing.assert_array_equal(np.concatenate(parts[:2]), parts[2])


def test_fit_on_augmented_data_is_as_in_one_process():
    (worker,), (plain,) = job(1), job(1, "plain")
    assert worker["fit on augmented data"] == plain["fit on augmented data"]
    # Sums are over 8 rows and 16 inputs, below 4; each of 12 steps moves weights by a tenth.
    bound = training(gain=0.1, terms=8 + 16, steps=12, gradients=4 * 4 * 8)
    for other in job(2):
        weights = other["fit on augmented data"]
        np.testing.assert_allclose(weights, plain["fit on augmented data"], rtol=0, atol=bound)


def test_data_that_each_worker_builds_are_augmented_in_its_own_way():
    first, second = (worker["batches"]["by function"] for worker in job(2))
    for part in (0, 1, 3):  # RandomFlip, a SeedGenerator, tf.random
        assert first[part] != second[part]
    assert sorted(first[2] + second[2]) == list(range(ROWS))  # rows are shuffled alike


def test_replicas_draw_their_own_numbers_in_local_steps():
    first, second = job(2)
    for one, other in zip(first["local steps"], second["local steps"], strict=True):
        assert one != other
    assert first["weights of local steps"] == second["weights of local steps"]


def test_the_mean_gradient_of_dropout_varies_as_in_one_process():
    gradients = np.array(job(2)[0]["gradients"])
    # A row's gradient is 1 / KEEP with probability KEEP, else 0: its variance is this. The fourth
    # moment of a mean of 8 rows is below the normal distribution's 3, as a Bernoulli variable's
    # with KEEP = 3/4 is 7/3. So the variance of n draws deviates by sqrt(2 / n) of itself.
    expected = (1 - KEEP) / KEEP / ROWS
    deviation = expected * np.sqrt(2 / gradients.size)
    assert abs(np.var(gradients) - expected) < 6 * deviation  # equal masks: 2 times `expected`
