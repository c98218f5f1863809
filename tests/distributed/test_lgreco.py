"""L-GreCo between real workers: one plan for all, in each way to train, and in jobs that resume."""

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.workers import result, run_workers
from tf_gradcomp.compressors import PowerSGD
from tf_gradcomp.policy import Policy

PROGRAM = Path(__file__).parent / "programs" / "lgreco.py"
SHAPES = [(8, 128), (128,), (128, 32), (32,), (32, 3), (3,)]
OWN = PowerSGD(3).settings([Policy().spec("layer/kernel", shape, "float32") for shape in SHAPES])


@pytest.fixture(scope="module")
def by_strategy():
    return [result(worker) for worker in run_workers(PROGRAM, 2, ["strategy"])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("backup")


@pytest.fixture(scope="module")
def killed(folder):
    return run_workers(PROGRAM, 2, ["killed", folder], check=False)


@pytest.fixture(scope="module")
def resumed(killed, folder):
    return [result(worker) for worker in run_workers(PROGRAM, 4, ["resume", folder])]


def test_both_ways_to_train_plan_alike_also_with_several_steps_in_an_execution(killed, by_strategy):
    by_optimizer = result(killed[0])["epochs"]
    assert len(by_optimizer) == 2
    chief, other = (worker["epochs"] for worker in by_strategy)
    assert chief[:2] == by_optimizer
    for name in ("weights", "plan", "factors", "ratio"):
        assert [epoch[name] for epoch in other] == [epoch[name] for epoch in chief]
    assert chief[0]["plan"][0] == OWN
    assert chief[0]["ratio"] == 1
    assert chief[1]["plan"][0] != OWN
    assert chief[1]["ratio"] == chief[1]["plan"][1] > 1
    # An epoch ends amid a period, and the last one at its end. Only the chief has the sums.
    assert [np.any(epoch["sums"][0]) for epoch in chief] == [True, True, False]
    assert not any(np.any(epoch["sums"][0]) for epoch in other)


def test_more_workers_go_on_with_the_plan_and_the_sums_of_a_job_that_was_killed(killed, resumed):
    assert killed[1].returncode == -signal.SIGKILL
    saved = result(killed[0])["epochs"][1]
    for worker in resumed:
        assert worker["epochs"] == [2]
        restored = worker["restored"]
        for name in ("weights", "plan", "sums", "factors", "next plan"):
            assert restored[name] == saved[name], name
        assert worker["end"] == resumed[0]["end"]
        assert not np.any(worker["end"]["sums"][0])  # a plan was made, at the end of the period
        assert worker["end"]["weights"] != saved["weights"]


@pytest.mark.parametrize(
    ("when", "messages"),
    [
        ("at the start", ["WorkersDisagreeError", "planned setting of", "worker 1 has"]),
        ("later", ["InvalidArgumentError"]),
    ],
)
def test_a_worker_with_another_plan_is_found(by_strategy, when, messages):
    for worker in by_strategy:
        for message in messages:
            assert message in worker[when]
