"""Any number of workers loads what two saved, and keeps the sum of the residuals."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close
from tests.distributed.common import Setup, dense_model, digits, residual_sums, scalar, state_digest
from tests.ranks import argument, exchange_of, report
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file


def new_model(seed=0, optimizer=None):
    optimizer = optimizer or (lambda: setup.wrap(keras.optimizers.Adam(1e-2)))
    model = setup.model(dense_model, optimizer, seed=seed)
    with setup.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model


def state(model):
    exchange = exchange_of(model)
    return {
        **state_digest(model),
        "residual sums": residual_sums(exchange),
        "waits": bool(exchange.facts.has_residual.numpy().any()),
        "iterations": scalar(model.optimizer.iterations),
    }


def fit(model, rows=96):
    model.fit(x[:rows], y[:rows], batch_size=24, verbose=0, shuffle=False)


def checkpoint_of(model):
    """All there is, by TensorFlow's own means."""
    if setup.way == "strategy":
        return tf.train.Checkpoint(model=model, exchange=exchange_of(model))
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def save():
    model = new_model()
    fit(model)
    checkpoint_of(model).write(gc.worker_path(FOLDER / setup.way / "tf"))
    if setup.way == "optimizer":
        model.save(gc.worker_path(FOLDER / "whole.keras"))
        model.save_weights(gc.worker_path(FOLDER / "only.weights.h5"))
    seen = {"saved": state(model)}
    if setup.way == "optimizer":
        stock = new_model(optimizer=lambda: keras.optimizers.Adam(1e-2))
        fit(stock)
        stock.save_weights(gc.worker_path(FOLDER / "stock.weights.h5"))
        tf.train.Checkpoint(model=stock).write(gc.worker_path(FOLDER / "stock"))
        seen["stock"] = state_digest(stock)
    return seen


def load():
    seen = {}
    model = new_model(seed=1)
    checkpoint_of(model).read(str(FOLDER / setup.way / "tf")).assert_consumed()
    seen["tf"] = load_and_train(model)
    if setup.way == "strategy":
        return seen
    # Into a model that has trained on: neither its weights nor its residuals may be left.
    model.load_weights(FOLDER / "only.weights.h5")
    seen[".weights.h5"] = load_and_train(model)
    model.load_weights(FOLDER / "stock.weights.h5")  # which holds no residuals
    seen["stock .weights.h5"] = load_and_train(model)
    with setup.strategy.scope():
        model = keras.saving.load_model(FOLDER / "whole.keras")
    seen[".keras"] = load_and_train(model)
    seen["config"] = {
        "optimizer": type(model.optimizer).__name__,
        "inner": type(model.optimizer.inner_optimizer).__name__,
        "compressor": repr(model.optimizer.compressor),
    }
    return seen


def load_and_train(model):
    """Returns the loaded state, and the results of a step on it."""
    before = state(model)
    fit(model, 24)
    return {
        **before,
        "waits later": bool(exchange_of(model).facts.has_residual.numpy().any()),
        "residual sums later": residual_sums(exchange_of(model)),
        "finite later": bool(np.all([np.isfinite(v).all() for v in model.get_weights()])),
    }


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
    return results(run_workers(PROGRAM, workers, args))


if __name__ == "__main__":
    FOLDER = Path(argument(2))
    setup = Setup(argument(3))
    x, y = digits(96)
    report({"save": save, "load": load}[argument(1)]())
