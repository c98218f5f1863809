"""Tests Muon in rounds on two workers, against MuLoCo in NumPy."""

from pathlib import Path

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.bounds import rounding
from tests.distributed import muon_cases as cases
from tests.reference import muloco
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "muon.py"
WORKERS = 2
BUCKET = 32  # of QSGD
LEVELS = 3  # steps between the levels of two bits


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    return [result(worker) for worker in run_workers(PROGRAM, WORKERS, [folder])]


def new_muon(**settings):
    rate, decay, adam_decay = cases.SETTINGS.values()
    return muloco.Muon(cases.PATHS, cases.SHAPES, rate, decay, adam_decay, **settings)


def arrays(lists):
    return [np.asarray(values, np.float64) for values in lists]


def local_round(muons, start, steps):
    """Returns each worker's weights after local steps, and the bounds of their errors."""
    weights = []
    for rank, muon in enumerate(muons):
        muon.begin()
        local = [value.copy() for value in start]
        for step_gradients in steps:
            if step_gradients[rank] is not None:  # the worker's share of the sum
                grads = [None if g is None else WORKERS * g for g in step_gradients[rank]]
                muon.step(local, grads)
        weights.append(local)
    return weights, np.max([muon.error for muon in muons], 0)


def assert_within(actual, expected, errors):
    for value, other, error in zip(arrays(actual), expected, errors, strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=error)


def means(weights, start):
    """Returns the common weights of a round without an outer optimizer."""
    return [np.mean(pair, 0) for pair in zip(*weights, strict=True)]


@pytest.mark.parametrize("name", cases.METHODS)
def test_rounds_are_those_of_muloco(jobs, name):
    seen = [job["rounds"][name] for job in jobs]
    muons = [new_muon(), new_muon()]
    outer = muloco.Nesterov(cases.OUTER["learning_rate"], cases.OUTER["momentum"])
    steps = cases.gradients(11)
    # The third round ends early, by the save; a new job takes the fourth.
    for before, after, begin, end in ((0, 1, 0, 3), (1, 2, 3, 6), (2, 3, 6, 8), (4, 5, 8, 11)):
        start = arrays(seen[0][before]["values"])
        weights, errors = local_round(muons, start, steps[begin:end])
        # The pseudo-gradient, its residual and the outer step round a few more times.
        errors = [e + rounding(2.0, 8) for e in errors]
        sent = []
        for worker, local in zip(seen, weights, strict=True):
            shares = [(a - b) / WORKERS for a, b in zip(start, local, strict=True)]
            sent.append(sent_of(name, worker[before], worker[after], shares, errors))
        total = [np.sum(pair, 0) for pair in zip(*sent, strict=True)]
        expected = outer.step(start, total)
        # The outer step multiplies the sum of both shares' errors.
        gain = cases.OUTER["learning_rate"] * (1 + cases.OUTER["momentum"]) * (after + 1)
        assert_within(seen[0][after]["values"], expected, gain * np.asarray(errors))
        assert max(gain * np.asarray(errors)) < 0.05 * np.abs(expected[0] - start[0]).max()
        if after == 3:  # the new job has the chief's state on both workers
            muons[1].momentum = [value.copy() for value in muons[0].momentum]
            muons[1].velocity = [value.copy() for value in muons[0].velocity]
    for first, second in zip(*seen, strict=True):
        assert first["values"] == second["values"]
    assert [one["exchanges"] for one in seen[0]] == [0, 1, 2, 3, 3, 4]
    assert [one["iterations"] for one in seen[0]] == [0, 3, 6, 8, 8, 11]


def sent_of(name, before, after, shares, errors):
    """Returns what a worker has sent, by its residuals; checks the compressor's rule."""
    if name == "no_compression":
        return shares
    sent = []
    for index, (share, error) in enumerate(zip(shares, errors, strict=True)):
        whole = np.asarray(before["residuals"][index]) + share
        left = np.asarray(after["residuals"][index], np.float64)
        sent.append(whole - left)
        if name == "top_k":
            assert np.count_nonzero(left) == left.size - left.size // 4
            kept = left != 0
            np.testing.assert_allclose(left[kept], whole[kept], rtol=0, atol=error)
            assert np.abs(whole[~kept]).min() >= np.abs(whole[kept]).max() - 2 * error
        elif cases.PATHS[index] == "bias":
            assert not np.any(left)
        else:
            flat, rest = whole.reshape(-1), left.reshape(-1)
            for begin in range(0, flat.size, BUCKET):
                bucket = slice(begin, begin + BUCKET)
                unit = np.ptp(flat[bucket]) / LEVELS
                assert np.abs(rest[bucket]).max() <= unit + 2 * error
            assert np.any(left)
    return sent


def test_a_new_job_shares_the_residual_equally(jobs):
    for name in ("top_k", "qsgd"):
        saved, restored = ([job["rounds"][name][i] for job in jobs] for i in (3, 4))
        for index in range(len(cases.SHAPES)):
            total = sum(np.float32(one["residuals"][index]) for one in saved)
            for one in restored:
                np.testing.assert_array_equal(np.float32(one["residuals"][index]), total / 2)
        assert restored[0]["values"] == restored[1]["values"] == saved[0]["values"]


def test_workers_share_nothing_within_a_round(jobs):
    muons = [new_muon(), new_muon()]
    weights, errors = local_round(muons, arrays(cases.initial()), cases.gradients(2))
    for job, local in zip(jobs, weights, strict=True):
        assert_within(job["within"]["values"], local, errors)
    assert np.abs(weights[0][0] - weights[1][0]).max() > 10 * errors[0]


@pytest.mark.parametrize("clip", cases.CLIPS)
def test_each_worker_clips_its_own_gradients(jobs, clip):
    start, steps = arrays(cases.initial()), cases.of_different_sizes(cases.gradients(4))
    muons = [new_muon(**{clip: cases.CLIPS[clip]}) for _ in range(WORKERS)]
    weights, errors = local_round(muons, start, steps)
    unclipped, _ = local_round([new_muon(), new_muon()], start, steps)
    assert np.abs(weights[0][0] - unclipped[0][0]).max() > 4 * errors[0]
    for job in jobs:
        assert_within(job["clipped"][clip]["values"], means(weights, start), errors)


def test_variables_without_a_gradient_neither_move_nor_decay(jobs):
    muons, start = [new_muon(), new_muon()], arrays(cases.initial())
    steps = cases.with_missing(cases.gradients(6))
    weights, first_errors = local_round(muons, start, steps[:3])
    weights, errors = local_round(muons, means(weights, start), steps[3:])
    for job in jobs:
        errors_of_both = np.add(first_errors, errors)
        assert_within(job["missing"]["values"], means(weights, start), errors_of_both)


def test_a_worker_skips_a_step_alone_although_weights_decay(jobs):
    steps, start = cases.gradients(3), arrays(cases.initial())
    steps[1][1] = None
    weights, errors = local_round([new_muon(), new_muon()], start, steps)
    for job in jobs:
        assert_within(job["scaled"]["values"], means(weights, start), errors)
    assert [job["scaled"]["scale"] for job in jobs] == [8.0, 4.0]
    assert [job["scaled"]["skipped"] for job in jobs] == [0, 1]


def test_synchronous_steps_divide_nothing_and_average_no_weights(jobs):
    for job in jobs:
        seen = job["synchronous"]
        assert not seen["divides"]
        assert seen["collectives"] == 2  # the lengths and the payloads
        assert seen["values"] == jobs[0]["synchronous"]["values"]


@pytest.mark.parametrize("step", ["5", "6"])
def test_a_resumed_job_continues_like_one_that_never_ended(jobs, step):
    # Both workers have the same rows, so that the chief's state is that of both.
    for job in jobs:
        seen = job["resumed"][step]
        assert seen["ended"]["saved"] == seen["whole"]["begin"] == seen["resumed"]["begin"]
        assert seen["resumed"]["end"] == seen["whole"]["end"]
        assert seen["resumed"]["begin"]["iterations"] == int(step)
        assert seen["resumed"]["end"]["iterations"] == int(step) + 8
        assert seen["resumed"]["end"] == jobs[0]["resumed"][step]["resumed"]["end"]


def test_fit_in_float16_skips_a_step_of_one_worker_alone(jobs):
    first, second = (job["in_float16"] for job in jobs)
    assert first["values"] == second["values"]
    assert (first["skipped"], second["skipped"]) == (0, 1)
    assert second["scale"] == first["scale"] / 2
    assert first["losses"][1] < first["losses"][0]
    assert np.isfinite(first["losses"]).all()


@pytest.mark.parametrize("local_steps", [None, 16])
def test_second_moments_in_front_of_muon_are_refused(local_steps):
    inner = keras.optimizers.Muon()
    with pytest.raises(ValueError, match=r'="local" is for.* Muon.*precondition="auto"'):
        gc.CompressedOptimizer(inner, precondition="local", local_steps=local_steps)
