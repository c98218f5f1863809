"""Tests each method between real workers: a bad step, a killed worker, and more workers that
resume."""

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.bounds import assert_close, training
from tests.workers import result, run_workers
from tf_gradcomp import compressors

PROGRAM = Path(__file__).parent / "programs" / "methods.py"
SUMMING = {"no_compression": 1, "cast": 2, "bfloat16": 2}
METHODS = compressors.names()
# By sums and broadcasts; a job that gathers is killed in test_two_level.py.
RATE, STEPS = 0.1, 8
STATES = ["adacomp", "alternating", "cast", "lgc", "lgreco", "power_sgd"]  # each keeps other state

quick = pytest.mark.quick("CompressedOptimizer")
every_method = pytest.mark.parametrize("method", [*METHODS, "bfloat16", "warmed up", "alternating"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("backups")


@pytest.fixture(scope="module")
def workers(folder):
    return [result(worker) for worker in run_workers(PROGRAM, 2, ["train", folder])]


@pytest.fixture(scope="module")
def resumed(workers, folder):
    return [result(worker) for worker in run_workers(PROGRAM, 3, ["resume", folder, *STATES])]


@quick
@every_method
def test_weights_and_slots_are_bit_equal(workers, method):
    first, second = (worker[method] for worker in workers)
    assert first["weights"] == second["weights"]
    assert first["slots"] == second["slots"]


@quick
@every_method
def test_the_bad_step_is_skipped_by_all_and_training_continues(workers, method):
    for worker in workers:
        assert worker[method]["skipped"] == 1
        assert worker[method]["improved"]
        assert all(np.isfinite(values).all() for values in worker[method]["values"])


@quick
@every_method
def test_the_bytes_of_the_tensors_are_in_the_payload(workers, method):
    for worker in workers:
        assert 0 < worker[method]["tensor bytes"] <= worker[method]["payload bytes"]


def test_survivor_of_a_sum_ends_with_a_named_error():
    """Kills a worker in a sum; test_faults.py does so in a gather and in a broadcast."""
    survivor, dead = run_workers(PROGRAM, 2, ["killed", "no_compression"], check=False)
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, None)
    assert "tensorflow.python.framework.errors_impl.UnavailableError" in survivor.stderr


@pytest.mark.parametrize("method", STATES)
def test_more_workers_resume_from_a_backup(workers, resumed, method):
    saved = workers[0][method]
    for worker in resumed:
        after = worker[method]
        assert after["epochs"] == [1]
        assert after["values"] == saved["values"]
        assert set(after["state"]) == set(saved["state"])
        for name, variables in saved["state"].items():
            for restored, before in zip(after["state"][name], variables, strict=True):
                assert_close(restored, before, terms=3 + 1)  # a third of it, three times
        assert after["skipped"] == 1
        assert after["weights"] == resumed[0][method]["weights"]


@quick
@pytest.mark.parametrize("method", SUMMING)
def test_sums_count_as_sent_in_a_ring(workers, method):
    for worker in workers:
        seen = worker[method]
        tag = {4: 4, 2: 8}[4 // SUMMING[method]]  # bytes, at most
        assert 0 < seen["payload bytes"] - seen["dense bytes"] / SUMMING[method] <= tag
        assert seen["sent bytes"] == pytest.approx(seen["payload bytes"], abs=2)  # of two workers


@quick
@pytest.mark.parametrize(("method", "dtype"), [("cast", "float16"), ("bfloat16", "bfloat16")])
def test_casting_trains_as_without_compression(workers, method, dtype):
    # Both workers round their gradients, and so does the sum.
    bound = training(RATE, terms=3, steps=STEPS, dtype=dtype)
    for worker in workers:
        for cast, dense in zip(
            worker[method]["values"], worker["no_compression"]["values"], strict=True
        ):
            np.testing.assert_allclose(cast, dense, rtol=0, atol=bound)
