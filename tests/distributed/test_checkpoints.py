"""Any number of workers loads what two saved, and keeps the sum of the residuals."""

from pathlib import Path

import numpy as np
import pytest

from tests.bounds import assert_close
from tests.workers import result, run_workers

PROGRAMS = Path(__file__).parent / "programs"
FORMATS = [".keras", ".weights.h5", "tf"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder):
    return [r["saved"] | {"stock": r["stock"]} for r in run(2, "save", folder, "optimizer")]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.oldest), 3, 1])
def loaded(request, saved, folder):
    return run(request.param, "load", folder, "optimizer")


@pytest.mark.parametrize("format_", FORMATS)
def test_weights_and_slots_are_restored_from(loaded, saved, format_):
    for worker in loaded:
        assert worker[format_]["weights"] == saved[0]["weights"]
        assert worker[format_]["slots"] == saved[0]["slots"]
        assert worker[format_]["iterations"] == saved[0]["iterations"]


@pytest.mark.parametrize("format_", FORMATS)
def test_sum_of_residuals_is_restored_from(loaded, saved, format_):
    for worker in loaded:
        assert worker[format_]["waits"]
        for restored, before in zip(
            worker[format_]["residual sums"], saved[0]["residual sums"], strict=True
        ):
            assert np.abs(before).max() > 0
            assert_close(restored, before, terms=4)


@pytest.mark.parametrize("format_", FORMATS)
def test_training_resumes_from(loaded, format_):
    single = len(loaded) == 1
    for worker in loaded:
        after = worker[format_]
        assert after["finite later"]
        # A single replica applies the others' residuals in its first step; several replicas keep
        # theirs.
        assert after["waits later"] != single
        assert (max(np.abs(r).max() for r in after["residual sums later"]) == 0) == single


def test_keras_file_brings_back_the_optimizer(loaded):
    for worker in loaded:
        assert worker["config"]["optimizer"] == "CompressedOptimizer"
        assert worker["config"]["inner"] == "Adam"
        assert worker["config"]["compressor"].startswith("AdaComp(")


def test_checkpoint_of_the_bare_optimizer_keeps_its_slots_and_starts_residuals_at_zero(
    loaded, saved
):
    for worker in loaded:
        restored = worker["stock .weights.h5"]
        assert restored["weights"] == saved[0]["stock"]["weights"]
        assert restored["slots"] == saved[0]["stock"]["slots"]
        assert all(np.all(np.equal(r, 0)) for r in restored["residual sums"])
        assert restored["finite later"]


def test_each_worker_saves_to_its_own_path(saved, folder):
    for path in ("whole.keras", "only.weights.h5", "optimizer/tf.index"):
        local = Path(path).parent / "worker-1" / Path(path).name
        assert (folder / path).is_file()
        assert (folder / local).is_file()


@pytest.fixture(scope="module")
def saved_by_strategy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strategy")
    return folder, run(2, "save", folder, "strategy")[0]["saved"]


@pytest.mark.parametrize("workers", [2, 1])
def test_residuals_of_the_strategy_are_restored_from_a_checkpoint(saved_by_strategy, workers):
    folder, saved = saved_by_strategy
    for worker in run(workers, "load", folder, "strategy"):
        assert worker["tf"]["weights"] == saved["weights"]
        for restored, before in zip(
            worker["tf"]["residual sums"], saved["residual sums"], strict=True
        ):
            assert np.abs(before).max() > 0
            assert_close(restored, before, terms=4)


def run(workers, action, folder, way):
    args = [action, folder, way]
    jobs = run_workers(PROGRAMS / "checkpoints.py", workers, args)
    return [result(worker) for worker in jobs]
