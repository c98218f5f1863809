"""Tests LGC between real workers: all phases, in each way to train, and in resumed jobs."""

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.bounds import rounding
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "lgc.py"
EPOCHS, STEPS = 4, 8
LARGEST = 160 * 32  # elements of a variable
ALIKE = ("weights", "slots", "phase", "facts", "skipped", "residuals", "told", "log")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def trained(folder):
    return [
        result(w) for w in run_workers(PROGRAM, 2, ["train", folder, "optimizer", "all_reduce"])
    ]


@pytest.fixture(scope="module")
def by_strategy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    args = ["train", folder, "strategy", "parameter_server"]
    return [result(worker) for worker in run_workers(PROGRAM, 2, args)]


@pytest.mark.parametrize("way", ["trained", "by_strategy"])
def test_all_workers_go_through_all_phases_together(way, request):
    chief, second = request.getfixturevalue(way)
    assert chief["phases"] == second["phases"] == sorted(chief["phases"])
    assert [epoch["log"] for epoch in chief["epochs"]] == [1, 2, 3, 3] or way == "by_strategy"
    assert chief["epochs"][-1]["log"] == 3
    for first, two in zip(chief["epochs"], second["epochs"], strict=True):
        for name in ALIKE:
            assert first[name] == two[name], name
    # In each epoch, and so in each phase, one step was skipped by all.
    assert [epoch["skipped"] for epoch in chief["epochs"]] == [1, 2, 3, 4]
    assert 0 < chief["tensors"] < chief["payload"]


def assert_resumes(job, saved):
    """The saved state is there again, and all phases that are left follow."""
    for name in ("weights", "phase", "skipped", "job"):
        assert job["restored"][name] == saved[name], name
    assert job["phases"] == sorted(job["phases"])
    assert job["epochs"][-1]["log"] == 3


@pytest.mark.parametrize("epoch", range(3))
def test_a_job_resumes_from_each_phase(trained, epoch):
    saved = trained[0]["epochs"][epoch]
    for worker in trained:
        job = worker["jobs"][epoch]
        assert_resumes(job, saved)
        assert job["phases"] == trained[0]["jobs"][epoch]["phases"]
        assert job["epochs"][-1]["weights"] == trained[0]["jobs"][epoch]["epochs"][-1]["weights"]
        assert job["epochs"][-1]["job"]["lgc_learned"] >= saved["job"]["lgc_learned"]
    assert trained[0]["jobs"][epoch]["restored"]["learnt"] == saved["learnt"]


def test_more_workers_resume_from_each_phase(trained, folder):
    resumed = [result(worker) for worker in run_workers(PROGRAM, 3, ["resume", folder])]
    for epoch in range(3):
        saved = trained[0]["epochs"][epoch]
        for worker in resumed:
            job = worker["jobs"][epoch]
            assert_resumes(job, saved)
            # A third of each residual, three times, and a sum over all of them.
            bound = rounding(saved["magnitude"], terms=3 + 1 + LARGEST)
            np.testing.assert_allclose(
                job["restored"]["residuals"], saved["residuals"], rtol=0, atol=bound
            )
            assert job["phases"] == resumed[0]["jobs"][epoch]["phases"]
            for one, two in zip(job["epochs"], resumed[0]["jobs"][epoch]["epochs"], strict=True):
                assert one["weights"] == two["weights"]
                assert one["told"] == two["told"]


def test_a_killed_job_resumes_from_its_last_epoch_with_more_workers(trained, tmp_path):
    """The autoencoder learns at that time; the tests above resume from the save of each phase."""
    whole, step = trained[0], 12
    assert whole["phases"][step - 1] == 2
    survivor, killed = run_workers(PROGRAM, 2, ["backup", tmp_path, step], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, None)
    assert "UnavailableError" in survivor.stderr
    workers = [result(w) for w in run_workers(PROGRAM, 3, ["backup", tmp_path, 0])]
    for worker in workers:
        assert worker["phases"] == workers[0]["phases"] == sorted(worker["phases"])
        assert len(worker["phases"]) == (EPOCHS - 1) * STEPS
        assert (worker["phases"][0], worker["phases"][-1]) == (whole["phases"][STEPS], 3)
        assert worker["epochs"][-1]["skipped"] == EPOCHS
        assert worker["epochs"][-1]["weights"] == workers[0]["epochs"][-1]["weights"]


@pytest.mark.parametrize("way", ["trained", "by_strategy"])
def test_a_worker_whose_autoencoder_is_another_one_is_found(way, request):
    for worker in request.getfixturevalue(way):
        assert "Error" in worker["other weights"]
        assert "no error" not in worker["other weights"]
