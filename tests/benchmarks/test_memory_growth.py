"""Judging whether the memory of processes grows."""

import random

import pytest
from memory_growth import Samples, slopes


def worker_samples(start, seconds, megabytes, records=0.5):
    """Returns samples of each second; TensorFlow's records grow by some megabytes per second."""
    times = [start + second for second in range(seconds)]
    record_megabytes = [records * second for second in range(seconds)]
    grown = [megabytes(second) + record for second, record in enumerate(record_megabytes)]
    return Samples("worker 1", times, grown, record_megabytes)


@pytest.mark.parametrize(("per_second", "is_flat"), [(0.0, True), (0.02, False), (0.5, False)])
def test_growing_memory_is_distinguished_from_noise(per_second, is_flat):
    chance = random.Random(0)
    samples = [
        worker_samples(
            start, 300, lambda s: 200 + min(s, 30) + per_second * s + chance.gauss(0, 0.1)
        )
        for start in (0, 310, 650)
    ]
    slope = slopes(samples, since=0.0)["worker 1"]
    assert slope.is_flat == is_flat
    assert slope.per_hour / 3600 == pytest.approx(per_second, abs=0.001)
    assert slope.megabytes == pytest.approx(230 + 165 * (0.5 + per_second), abs=0.5)
    assert slope.records == pytest.approx(0.5 * 3600)


def test_memory_that_wanders_counts_as_flat():
    chance = random.Random(0)
    flat = 0
    for _ in range(50):
        wandering = [700.0]
        for _ in range(3599):  # a sample forgets the one before within about a minute
            wandering.append(14 + 0.98 * wandering[-1] + chance.gauss(0, 10))
        samples = [worker_samples(0, 3600, wandering.__getitem__)]
        flat += slopes(samples, since=0.0)["worker 1"].is_flat
    assert flat >= 44  # of 50, each with a chance of at least 97.5 %: fewer 3 times in 10,000


def test_processes_that_do_not_live_long_are_not_judged():
    assert slopes([worker_samples(0, 60, lambda second: second)], since=0.0) == {}
    assert slopes([Samples("worker 1")], since=0.0) == {}
