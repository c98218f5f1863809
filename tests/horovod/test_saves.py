"""Saves of rank 0 hold the state of all ranks, for jobs of any number of workers."""

from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import rounding
from tests.horovod.common import compiled, fit, state_of, strategy, words_model
from tests.horovod.jobs import largest_difference, needs_horovod, only, run_ranks
from tests.ranks import BY_HOROVOD, RANK, argument, compressed, data, report, values
from tests.workers import results, run_workers
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras.common.wrappers import wrappers_of

pytestmark = needs_horovod
PROGRAM = Path(__file__)  # each rank runs this file


def new_model(seed=0):
    model = compiled(lambda: compressed(keras.optimizers.Adam(1e-2), "adacomp"), seed)
    with strategy().scope():
        model.optimizer.build(model.trainable_variables)
    return model


def own(model, name):
    exchange = model.optimizer.exchange
    return values(exchange.state[name])


def sums_of(model, name):
    """Returns a checkpoint's value of something that each replica has for itself."""
    exchange = model.optimizer.exchange
    with exchange.saving.saving_on_all():
        return values(map(exchange.saving.read, exchange.state[name]))


def save():
    model = new_model()
    callbacks = [gc.callbacks.CollectState()]
    if RANK == 0:
        path = FOLDER / "whole.keras"
        callbacks.append(keras.callbacks.ModelCheckpoint(path))
    fit(model, *data(4), callbacks=callbacks)
    before = {name: own(model, name) for name in model.optimizer.exchange.state}
    model.optimizer.collect_state()
    if RANK == 0:
        model.save_weights(FOLDER / "only.weights.h5")
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(FOLDER / "tf"))
    after = {name: own(model, name) for name in model.optimizer.exchange.state}
    fit(model, *data(1))
    seen = {"own": before, "unchanged": before == after}
    try:  # without having collected
        model.save_weights(FOLDER / f"own{RANK}.weights.h5")
    except ValueError as error:
        seen["refused"] = str(error)
    else:
        with h5py.File(FOLDER / f"own{RANK}.weights.h5") as file:
            seen["saved alone"] = [
                file[f"optimizer/vars/residual_{i}"][()].tolist() for i in (0, 1)
            ]
        seen["own later"] = own(model, "residual")[:2]
    by_name = keras.optimizers.OptimizerMap(wrapped_sgd(), {".*bias": wrapped_sgd()})
    several = compiled(lambda: keras.optimizers.MultiOptimizer(by_name))
    seen["several"] = save_of_wrappers(several, "several")
    return {**seen, "outside": save_of_wrappers(two_parts(), "outside")}


def wrapped_sgd():
    return compressed(keras.optimizers.SGD(1e-2), "adacomp")


class TwoParts(keras.Sequential):
    """Has a second optimizer for the last layer, as a GAN has two optimizers."""

    def set_second_optimizer(self, optimizer):
        self.second_optimizer = optimizer
        self.parts = [(self.optimizer, self.layers[:-1]), (optimizer, self.layers[-1:])]
        for one, layers in self.parts:
            one.build([v for layer in layers for v in layer.trainable_variables])

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for one, layers in self.parts:
            variables = [v for layer in layers for v in layer.trainable_variables]
            one.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def two_parts():
    """Ranks begin with different state of the second optimizer, and get rank 0's."""
    model = compiled(
        wrapped_sgd, build=lambda: TwoParts([keras.Input((4,)), *words_model().layers])
    )
    model.set_second_optimizer(compressed(keras.optimizers.SGD(1e-2, momentum=0.9), "adacomp"))
    (slot, *_) = model.second_optimizer.inner_optimizer.momentums
    slot.assign(tf.fill(slot.shape, RANK + 1.0))
    gc.broadcast_initial_state(model)
    assert float(tf.reduce_max(slot)) == 1.0
    return model


def save_of_wrappers(model, name):
    """Returns each wrapper's state as collected by rank 0, and the ranks' own state."""
    callbacks = [gc.callbacks.CollectState()]
    if RANK == 0:
        path = FOLDER / f"{name}.weights.h5"
        callbacks.append(keras.callbacks.ModelCheckpoint(path, save_weights_only=True))
    fit(model, *data(2), callbacks=callbacks)
    exchanges = [one.exchange for one in wrappers_of(model)]
    seen = {"own": [values(exchange.residuals) for exchange in exchanges]}
    if RANK == 0:
        seen["collected"] = [values(map(e.saving.read, e.residuals)) for e in exchanges]
    fit(model, *data(1), callbacks=[gc.callbacks.BackupAndRestore(FOLDER / name)])
    return seen


def load():
    seen = {}
    for way in ("whole.keras", "only.weights.h5", "tf"):
        if way == "whole.keras":
            keras.backend.clear_session()
            with strategy().scope():
                model = keras.saving.load_model(FOLDER / way)
        else:
            model = new_model(seed=1)
            if way == "tf":
                checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
                checkpoint.read(str(FOLDER / way)).assert_consumed()
            else:
                model.load_weights(FOLDER / way)
        seen[way] = {name: sums_of(model, name) for name in model.optimizer.exchange.state}
        seen[way]["exchanges"] = model.optimizer.exchange.exchanges
        group = model.optimizer.exchange.group
        by_strategy = isinstance(group, StrategyGroup)
        seen[way]["group"] = type(group.strategy).__name__ if by_strategy else "Horovod"
        if BY_HOROVOD:
            seen[way]["own"] = own(model, "residual")
    fit(model, *data(1))
    return {**seen, "later": state_of(model)}


THIRDS = rounding(1, terms=3 + 1)  # a third of a value, three times
SAVED = ["whole.keras", "only.weights.h5", "tf"]


def largest(arrays):
    return max(np.abs(array).max(initial=0) for array in arrays)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(folder):
    return results(run_ranks(PROGRAM, 2, ["save", folder]))


@pytest.fixture(scope="module")
def loaded(saved, folder):
    return {
        "Horovod": results(run_ranks(PROGRAM, 3, ["load", folder])),
        "MultiWorkerMirroredStrategy": results(run_workers(PROGRAM, 2, ["load", folder])),
    }


@pytest.mark.parametrize("job", ["Horovod", "MultiWorkerMirroredStrategy"])
@pytest.mark.parametrize("way", SAVED)
def test_another_job_resumes_from_the_save_of_rank_0(saved, loaded, job, way):
    workers = [worker[way] for worker in loaded[job]]
    for name in ("residual", "second_moment"):
        sums = [
            np.add(*np.float32(pair))
            for pair in zip(*(rank["own"][name] for rank in saved), strict=True)
        ]
        assert max(np.abs(total).max() for total in sums) > 0
        assert largest_difference(workers[0][name], sums) <= THIRDS * largest(sums)
    assert {worker["group"] for worker in workers} == {job}
    assert {worker["exchanges"] for worker in workers} == {4}


@pytest.mark.parametrize("wrappers", ["several", "outside"])
def test_callbacks_collect_the_state_of_all_wrappers_of_a_model(saved, wrappers):
    first, second = (rank[wrappers]["own"] for rank in saved)
    assert len(first) == 2
    for collected, *local in zip(saved[0][wrappers]["collected"], first, second, strict=True):
        sums = [np.add(*np.float32(pair)) for pair in zip(*local, strict=True)]
        assert max(np.abs(total).max() for total in sums) > 0
        assert largest_difference(collected, sums) == 0


@pytest.mark.parametrize("job", ["Horovod", "MultiWorkerMirroredStrategy"])
def test_a_resumed_job_trains_on_all_workers(loaded, job):
    only([worker["later"] for worker in loaded[job]])


def test_each_rank_gets_its_share_of_what_was_saved(loaded):
    ranks = [rank["only.weights.h5"] for rank in loaded["Horovod"]]
    assert largest_difference(only([rank["own"] for rank in ranks]), ranks[0]["residual"]) > 0
    shares = [3 * np.array(local) for local in ranks[0]["own"]]
    assert largest_difference(shares, ranks[0]["residual"]) <= THIRDS * largest(shares)


def test_collecting_changes_nothing_and_counts_until_the_next_step(saved):
    assert all(rank["unchanged"] for rank in saved)
    assert saved[0]["saved alone"] == saved[0]["own later"]
    assert np.any(saved[0]["saved alone"][0])
    assert all("rank 0 save" in rank["refused"] for rank in saved[1:])


if __name__ == "__main__":
    strategy()  # TensorFlow wants to know of its cluster before anything runs
    FOLDER = Path(argument(2))
    gc.CompressedOptimizer  # noqa: B018 (Keras finds the class when it is loaded)
    report({"save": save, "load": load}[argument(1)]())
