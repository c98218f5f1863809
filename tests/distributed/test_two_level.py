"""Processes with several replicas: these sum gradients, which the processes exchange as one each.

Their weights, sent bytes and state are compared with a job of one replica in each process, which
has the same part of each batch.
"""

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.bounds import assert_close, training
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "two_level.py"
LOCAL = ["rounds", "updates", "gossip"]  # in which each process has its own inner optimizer
TRAINED = ["no_compression", "adacomp", "scalecom", "table", "handed over", "eager", *LOCAL]
CHECKS = [*TRAINED, "lgreco"]  # for which a last bit may decide which entry is sent
FORMATS = [".weights.h5", "tf"]
# With a momentum of 0.9, SGD(0.1) moves a weight in 8 steps by at most 5.7 times a single step.
# Adam(0.01) has an epsilon of 0.05. Sums are over 16 rows, 16 inputs and 3 classes.
APART = training(gain=0.57, terms=16 + 16 + 3, steps=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    names = ("flat", "two levels", "one replica")
    return {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in names}


def run(replicas, *args, check=True):
    return run_workers(PROGRAM, 2, [replicas, *args], check=check)


@pytest.fixture(scope="module")
def flat(folders):
    """Runs two processes of two replicas; each replica exchanges with all other replicas."""
    workers = run(2, folders["flat"], "nothing", "flat")
    return [result(worker) for worker in workers]


@pytest.fixture(scope="module")
def ended(folders, flat):
    """Two processes of two replicas, on two levels; in the end, the second one is killed."""
    return run(2, folders["two levels"], folders["flat"], check=False)


@pytest.fixture(scope="module")
def two_level(ended):
    return [result(worker) for worker in ended]


@pytest.fixture(scope="module")
def one_replica(folders, two_level):
    """Two processes of one replica."""
    workers = run(1, folders["one replica"], folders["two levels"])
    return [result(worker) for worker in workers]


@pytest.fixture(scope="module")
def by_strategy():
    """As `two_level`, by a compressor on the strategy."""
    return [result(worker) for worker in run(2, "nothing", "nothing", "strategy")]


@pytest.fixture(scope="module")
def flat_by_strategy():
    """As `flat`, by a compressor on the strategy."""
    return [result(worker) for worker in run(2, "nothing", "nothing", "flat strategy")]


@pytest.fixture(params=["by_strategy", "flat_by_strategy"])
def with_strategy(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("check", TRAINED)
def test_trains_as_one_replica_in_each_process(two_level, one_replica, check):
    ours, theirs = two_level[0][check], one_replica[0][check]
    for value, expected in zip(ours["values"], theirs["values"], strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=APART)
    assert set(ours["state"]) == set(theirs["state"])
    for name, values in theirs["state"].items():
        largest = max(np.abs(value).max() for value in values)
        for value, expected in zip(ours["state"][name], values, strict=True):
            np.testing.assert_allclose(value, expected, rtol=0, atol=APART * largest)


@pytest.mark.parametrize("check", CHECKS)
def test_sends_the_bytes_of_one_replica_in_each_process(two_level, one_replica, check):
    for ours, theirs in zip(two_level, one_replica, strict=True):
        for count in ("exchanges", "payload bytes", "sent bytes", "dense bytes"):
            assert ours[check][count] == theirs[check][count] > 0


@pytest.mark.parametrize("check", [*CHECKS, "auto", "mixed_float16"])
def test_all_replicas_have_bit_equal_weights_and_slots(two_level, check):
    each = [worker[check]["replicas"] for worker in two_level]
    assert [len(digests) for digests in each] == [2, 2]
    assert [len(set(digests)) for digests in each] == [1, 1]
    assert each[0] == each[1] or check in LOCAL
    assert two_level[0][check].get("values") == two_level[1][check].get("values")


@pytest.mark.parametrize("check", LOCAL)
def test_only_the_process_of_a_replica_that_is_not_finite_skips_a_local_step(two_level, check):
    assert [worker[check]["skipped"] for worker in two_level] == [0, 1]


def test_processes_differ_within_a_round_and_their_replicas_do_not(two_level):
    first, second = (worker["within"] for worker in two_level)
    for seen in (first, second):
        assert len(set(seen["separate"])) == 1
        assert seen["rolled back"] == seen["common"] == first["common"]
    assert len({first["separate"][0], second["separate"][0], first["common"][0]}) == 3


def test_statistics_are_means_over_all_replicas_on_which_they_are_finite(two_level, one_replica):
    for workers, mean in ((two_level, (0 + 1 + 3) / 3), (one_replica, 0)):
        for worker in workers:
            np.testing.assert_allclose(worker["statistics"], np.float32(mean), rtol=1e-6)


def test_local_steps_of_replicas_that_exchange_by_themselves_are_refused(flat):
    for worker in flat:
        assert "two_level=False" in worker["refused"]


@pytest.mark.parametrize(
    ("check", "skipped"),
    [("no_compression", 1), ("adacomp", 1), ("scalecom", 1), ("table", 1), ("lgreco", 2)],
)
def test_a_step_that_is_not_finite_on_one_replica_is_skipped_by_all(two_level, check, skipped):
    for worker in two_level:
        assert worker[check]["skipped"] == skipped
        assert all(np.isfinite(value).all() for value in worker[check]["values"])


def test_loss_scale_follows_what_all_replicas_saw(two_level):
    for worker in two_level:
        assert worker["mixed_float16"]["skipped"] == 1
        assert worker["mixed_float16"]["scale"] == 2**14  # half of Keras' initial one


def test_a_plan_equals_the_plan_of_one_replica_in_each_process(two_level, one_replica):
    plans = {str(worker["lgreco"]["plan"]) for worker in (*two_level, *one_replica)}
    assert len(plans) == 1
    assert two_level[0]["lgreco"]["ratio"] > 1


def test_means_of_what_a_step_returns_are_over_all_replicas(two_level, one_replica):
    for workers, rank in ((two_level, 1.5), (one_replica, 0.5)):
        for worker in workers:
            for means in worker["means"]:
                assert means == {
                    "classes": ["float16", [1 + rank, 2 + rank, 4 + rank]],
                    "large": ["float32", 2**24 + 4 * rank],
                    "rank": ["float64", rank],
                    "alike": ["float32", 7],
                }


def test_state_is_kept_once_in_each_process(two_level, flat):
    for worker in two_level:
        assert worker["adacomp"]["replicated"] == 0
    assert flat[0]["adacomp"]["replicated"] > 0  # else this test would see nothing


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("job", ["from one level to two", "from two levels to one"])
def test_nothing_is_lost_in_a_checkpoint(request, format_, job):
    jobs = ("flat", "two_level") if "to two" in job else ("two_level", "one_replica")
    (before, *_), after = (request.getfixturevalue(name) for name in jobs)
    for worker in after:
        loaded = worker["loaded"][format_]
        assert set(loaded["replicas"]) == set(before["adacomp"]["replicas"])
        assert loaded["exchanges"] == before["adacomp"]["exchanges"]
        for name, values in before["adacomp"]["state"].items():
            assert max(np.abs(value).max() for value in values) > 0
            for value, expected in zip(loaded["state"][name], values, strict=True):
                assert_close(value, expected, terms=4 + 1)  # a quarter of it, four times


def test_sums_accumulated_by_one_replica_are_divided_among_all(two_level, one_replica):
    ours, theirs = (workers[0]["taken over"] for workers in (two_level, one_replica))
    for total, expected in zip(ours, theirs, strict=True):
        assert_close(total, expected, terms=16 + 16 + 3)
        np.testing.assert_allclose(total, 1, atol=0.1)  # and the gradients of a step


def test_training_resumes_from_a_checkpoint_of_another_form(two_level, one_replica):
    for workers in (two_level, one_replica):
        later = [worker["loaded"]["later"] for worker in workers]
        assert len({digest for seen in later for digest in seen["replicas"]}) == 1
        for seen in later:
            assert seen["exchanges"] == workers[0]["loaded"]["tf"]["exchanges"] + 2


def test_compressor_on_the_strategy_trains_to_the_last_bit_alike(by_strategy, two_level):
    ours, theirs = by_strategy[0]["table"], two_level[0]["table"]
    assert ours["values"] == theirs["values"]
    assert ours["sent bytes"] == theirs["sent bytes"]


def test_all_replicas_are_equal_with_a_compressor_on_the_strategy(with_strategy):
    digests = [digest for worker in with_strategy for digest in worker["table"]["replicas"]]
    assert len(digests) == 4
    assert len(set(digests)) == 1
    assert {worker["table"]["skipped"] for worker in with_strategy} == {1}


def test_gradients_reduced_by_hand_are_sums_over_all_replicas(with_strategy):
    for worker in with_strategy:
        for total in worker["by hand"]:
            np.testing.assert_array_equal(total, np.full(30, 4.0))


def test_reducing_in_a_branch_is_refused_with_the_way_out(with_strategy):
    for worker in with_strategy:
        assert "reduce gradients outside it" in worker["in a branch"]


def test_survivor_of_a_killed_process_ends_with_a_named_error(ended):
    survivor, dead = ended
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, None)
    assert "tensorflow.python.framework.errors_impl.UnavailableError" in survivor.stderr
