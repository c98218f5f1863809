"""Three workers resume from a job of two, get advice, report differences, and lose one."""

import os
import signal
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.keras2.common import compiled, fit, keras, new_strategy, state_of, words_model
from tests.keras2.jobs import (
    RESTORED,
    TRAINED,
    by_horovod,
    by_strategy,
    horovod_workers,
    largest_difference,
    needs_horovod,
    tf_keras,
)
from tests.keras2.optimizers import OPTIMIZERS
from tests.keras2.saving import folder_of_rank, loaded, saved, seen
from tests.ranks import RANK, SIZE, argument, compressed, data, report
from tests.workers import result, results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file


def make_adam():
    return compressed(OPTIMIZERS["Adam"](), "adacomp(bin_sizes=10)")


def dense(strategy):
    model = compiled(lambda: compressed(OPTIMIZERS["Adam"](), "no_compression"), strategy)
    fit(model, *data(8))
    return state_of(model)


def alone():
    model = compiled(OPTIMIZERS["Adam"], tf.distribute.get_strategy())
    fit(model, *data(8))
    return state_of(model)


def two(strategy):
    model = compiled(make_adam, strategy)
    fit(model, *data(4))
    before = seen(model)
    saved(model, "Adam", "checkpoint")
    return before


def gone_on_with(strategy):
    model = loaded(SAVED_BY_FIRST, "checkpoint", make_adam, strategy)
    restored = seen(model)
    fit(model, *data(4, seed=2))
    return {"restored": restored, "later": state_of(model)}


def chosen(strategy):
    model = compiled(lambda: compressed(keras.optimizers.Adam(1e-2), "auto"), strategy)
    fit(model, *data(4))
    return {"method": repr(model.optimizer.exchange.compressor), **state_of(model)}


def advised(strategy):
    model = compiled(make_adam, strategy)
    with strategy.scope():
        advice = gc.advise(model, ["adacomp", "scalecom"], compute_seconds=0.01)
    return [prediction.method for prediction in advice.predictions if prediction.step > 0.01]


def larger_model():
    return keras.Sequential([*words_model().layers[:-1], keras.layers.Dense(4)])


def told(strategy):
    build = larger_model if RANK == 1 else words_model
    try:
        fit(compiled(make_adam, strategy, build=build), *data(1))
    except gc.WorkersDisagreeError as error:
        return str(error)
    return None


class Dies(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2 and RANK == 2:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def one_of_three():
    return result(*run_workers(PROGRAM, 1, [""]))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Returns the saved state of two workers, and of three workers that resumed until one was
    killed."""
    folder = tmp_path_factory.mktemp("three")
    two = by_strategy(PROGRAM, folder)
    return two, run_workers(PROGRAM, 3, [folder], check=False)


@tf_keras
@needs_horovod
def test_three_ranks_resume_from_a_job_of_two(tmp_path):
    two = by_horovod(PROGRAM, tmp_path)
    with horovod_workers(3) as run:
        ranks = run(PROGRAM, args=[tmp_path, "gone_on_with"])
    test_three_resume_from_a_job_of_two((two, ranks))


def test_three_train_as_one_process_and_stay_equal(three, one_of_three):
    reports = results(three[1])
    for name in ("dense", "chosen"):
        assert all(report[name] == reports[0][name] for report in reports)
    dense = reports[0]["dense"]
    assert largest_difference(dense["values"], one_of_three["values"]) <= TRAINED
    assert dense["iterations"] == one_of_three["iterations"]


def test_three_resume_from_a_job_of_two(three):
    saved, workers = three
    for worker in workers:
        seen = result(worker)["gone_on_with"]
        residuals = pytest.approx(saved[0]["residuals"], rel=RESTORED)
        assert seen["restored"] == {**saved[0], "residuals": residuals}
        assert seen["later"] == result(workers[0])["gone_on_with"]["later"]


def test_three_get_advice_and_report_differences(three):
    for worker in three[1]:
        seen = result(worker)
        assert seen["advised"] == ["no_compression", "adacomp", "scalecom"]
        assert "worker 1 has" in seen["told"]


def test_two_end_with_an_error_when_the_third_is_killed(three):
    *survivors, dead = three[1]
    assert dead.returncode == -signal.SIGKILL
    for survivor in survivors:
        assert survivor.returncode not in (0, None)
        assert "UnavailableError" in survivor.stderr


if __name__ == "__main__":
    SAVED_BY_FIRST = os.path.join(argument(1), "rank0", "Adam.checkpoint-1")
    strategy = new_strategy() if SIZE > 1 else tf.distribute.get_strategy()
    if SIZE == 1:
        report(alone())
    elif SIZE == 2:
        os.makedirs(folder_of_rank())
        report(two(strategy))
    else:
        parts = [dense, gone_on_with, chosen, advised, told]
        if len(sys.argv) > 2:
            report({argument(2): globals()[argument(2)](strategy)})
            sys.exit()
        report({part.__name__: part(strategy) for part in parts})
        fit(compiled(make_adam, strategy), *data(8), callbacks=[Dies()])
