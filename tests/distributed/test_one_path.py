"""Tests the files of saves to one path, and of the chief alone, and that no worker hangs."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import assert_close
from tests.workers import result, run_workers
from tf_gradcomp import CompressedOptimizer  # noqa: F401  # registers it, to load models with it

PROGRAM = Path(__file__).parent / "programs/one_path.py"
LARGEST = 8 * 32  # elements of a variable, whose sums are compared


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("one path")


@pytest.fixture(scope="module")
def job(folder):
    return run_workers(PROGRAM, 2, [folder])


@pytest.fixture(scope="module")
def workers(job):
    return [result(worker) for worker in job]


def assert_holds(held, sums):
    for name, wanted in sums.items():
        for got, value in zip(held[name], wanted, strict=True):
            assert np.any(value)
            np.testing.assert_array_equal(np.float32(got), np.float32(value), name)


@pytest.mark.parametrize("path", ["m.keras", "1.keras", "batch.weights.h5"])
def test_one_path_on_all_workers_holds_the_state_of_all(workers, path):
    for worker in workers:  # each of them sees the complete file as soon as it has saved
        assert_holds(worker["all"][path], worker["all"]["sums"])


def test_a_checkpoint_manager_on_all_workers_keeps_what_it_should(workers):
    for worker in workers:
        seen = worker["all"]
        assert seen["latest"] == "checkpoints/ckpt-3"
        files = [f"ckpt-{n}.{end}" for n in (2, 3) for end in ("data-00000-of-00001", "index")]
        assert seen["checkpoints"] == ["checkpoint", *files]
        total = [np.abs(value).sum() for values in seen["sums"].values() for value in values]
        assert_close(seen["in checkpoint"], sorted(total), terms=LARGEST)


def test_several_files_are_written_twice_to_one_path(workers, folder):
    weights = [value.shape for value in keras.models.load_model(folder / "m.keras").get_weights()]
    for worker in workers:
        seen = worker["all"]
        assert seen["prefix"] == seen["in checkpoint"]
        assert_close(seen["served"], seen["predicted"], terms=LARGEST)
    whole = keras.models.load_model(folder / "folder")
    shards = keras.models.load_model(folder / "folder")
    for variable in [*shards.variables, *shards.optimizer.variables]:
        variable.assign(-np.ones(variable.shape, variable.dtype))
    shards.load_weights(folder / "shards.weights.json")
    assert [value.shape for value in whole.get_weights()] == weights
    for weight, other_weight in zip(whole.get_weights(), shards.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other_weight)


def test_the_chief_alone_exports(folder):
    served = tf.saved_model.load(folder / "chief-served")
    assert np.isfinite(served.serve(np.ones((2, 8), "float32"))).all()


def test_a_checkpoint_of_variables_without_their_exchange_holds_the_sums(workers):
    for worker in workers:
        assert_holds({"residual": worker["alone"]["held"]}, {"residual": worker["alone"]["wanted"]})


def test_a_save_that_has_not_found_an_exchange_is_an_error(workers):
    for worker in workers:
        assert "the saved object does not contain the exchange" in worker["alone"]["error"]


def test_logs_are_written_once(workers, folder):
    assert [row["epoch"] for row in workers[0]["all"]["log"]] == ["0"]
    assert len(list((folder / "logs").rglob("events.*"))) == 1


def test_separate_paths_are_used(workers, folder):
    assert all(worker["all"]["paths of their own"] for worker in workers)
    assert not list(folder.glob(".*"))  # no temporary files are left


@pytest.mark.parametrize("path", ["best.keras", "chief.keras"])
def test_the_chief_alone_saves_what_was_collected_at_the_end_of_the_epoch(workers, path):
    assert_holds(workers[0]["chief"][path], workers[0]["chief"]["sums"])


def test_a_chief_that_saves_alone_saves_its_own_state_with_a_notice(workers, job):
    chief = workers[0]["chief"]
    local = chief["own"]
    twice = [(2 * np.float32(value)).tolist() for value in local["second_moment"]]
    wanted = {"residual": local["residual"], "second_moment": twice}
    assert_holds(chief["own.weights.h5"], wanted)
    total = [np.abs(value).sum() for values in wanted.values() for value in values]
    assert_close(chief["own checkpoint"], sorted(total), terms=LARGEST)
    assert job[0].stderr.count("holds only the residuals of the chief") == 1
    assert job[0].stderr.count("holds the residuals of all 2 workers") == 1


def test_the_chief_alone_saves_what_collect_state_has_collected(workers):
    chief = workers[0]["chief"]
    assert_holds(chief["collected.weights.h5"], chief["sums of collected"])


def test_after_the_chief_has_saved_alone_all_save_together(workers):
    for worker in workers:
        assert_holds(worker["chief"]["after.weights.h5"], worker["chief"]["sums after"])


def test_an_error_of_the_chief_reaches_all_workers(workers):
    first, second = (worker["errors"]["no folder"] for worker in workers)
    assert "No such file" in first
    assert "The chief could not save" in second


def test_a_file_that_has_lost_the_optimizer_is_not_loaded_in_silence(job):
    assert "holds no state of the optimizer" in job[0].stderr


def test_a_saved_model_loads_for_evaluation_in_one_process(workers, folder):
    model = keras.models.load_model(folder / "m.keras", compile=False)
    assert np.isfinite(model.predict(np.ones((2, 8)), verbose=0)).all()
