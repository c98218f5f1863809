"""Tests the files of saves to one path, and of the chief alone, and that no worker hangs."""

import csv
import io
import os
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close
from tests.distributed.common import Setup, dense_model, digits
from tests.ranks import RANK, argument, exchange_of, report
from tests.workers import results, run_workers
from tf_gradcomp.strategy.coordinated import coordinated

PROGRAM = Path(__file__)  # each worker runs this file


def new_model():
    adam = lambda: setup.wrap(keras.optimizers.Adam(1e-2), precondition="auto")  # noqa: E731
    model = setup.model(dense_model, adam)
    with setup.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model


NAMES = ("residual", "second_moment")


def fit(*callbacks):
    model.fit(x, y, batch_size=24, verbose=0, shuffle=False, callbacks=list(callbacks))


def sums():
    """Sums the state of all workers, by a collective."""
    return {name: [np.asarray(v).tolist() for v in exchange.state[name]] for name in NAMES}


def own():
    return {name: [v.values[0].numpy().tolist() for v in exchange.state[name]] for name in NAMES}


def held(path):
    """Reads the content of a Keras file."""
    content = Path(path).read_bytes()
    if path.endswith(".keras"):
        content = zipfile.ZipFile(io.BytesIO(content)).read("model.weights.h5")
    with h5py.File(io.BytesIO(content)) as file:
        stored = file["optimizer/vars"]
        return {n: [stored[f"{n}_{i}"][()].tolist() for i in range(4)] for n in NAMES}


def held_by_checkpoint(path):
    reader = tf.train.load_checkpoint(path)
    shapes = reader.get_variable_to_shape_map()
    return sorted(
        np.abs(reader.get_tensor(name)).sum().tolist()
        for name in shapes
        if "/residual/" in name or "/second_moment/" in name
    )


def on_all():
    """Keras' callbacks with one path, each on all workers."""
    callbacks = [
        keras.callbacks.ModelCheckpoint("{epoch}.keras"),
        keras.callbacks.ModelCheckpoint("batch.weights.h5", save_weights_only=True, save_freq=1),
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.TensorBoard("logs"),
    ]
    fit(*callbacks)
    with setup.strategy.scope():
        model.save("m.keras")
    seen = {"m.keras": held("m.keras"), "1.keras": held("1.keras"), "sums": sums()}
    seen["batch.weights.h5"] = held("batch.weights.h5")
    with open("log.csv") as file:
        seen["log"] = list(csv.DictReader(file))
    manager = tf.train.CheckpointManager(checkpoint(), "checkpoints", max_to_keep=2)
    for _ in range(3):
        manager.save()
    names = os.listdir("checkpoints")  # TensorFlow may just now replace its own file of the state
    seen["checkpoints"] = sorted(name for name in names if not name.startswith("checkpoint.tmp"))
    seen["latest"] = manager.latest_checkpoint
    seen["in checkpoint"] = held_by_checkpoint(manager.latest_checkpoint)
    for _ in range(2):  # the second time over the first
        checkpoint().write("prefix")
        model.save("folder", zipped=False)
        model.save_weights("shards.weights.json", max_shard_size=1e-6)
        model.export("served", verbose=False)
    seen["prefix"] = held_by_checkpoint("prefix")
    served = tf.saved_model.load("served")
    seen["served"] = served.serve(x).numpy().tolist()
    seen["predicted"] = model.predict(x, verbose=0).tolist()
    model.save_weights(f"temporary-{RANK}.weights.h5")
    seen["paths of their own"] = os.path.exists(f"temporary-{RANK}.weights.h5")
    return seen


def checkpoint():
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def without_the_exchange():
    """Saves residuals by their variables alone, then by a save that does not know of them."""
    step()
    wanted = sums()["residual"]
    tf.train.Checkpoint(left=list(exchange.residuals)).write("left")
    names = [f"left/{i}/.ATTRIBUTES/VARIABLE_VALUE" for i in range(len(wanted))]
    seen = {"wanted": wanted, "held": [tf.train.load_variable("left", n) for n in names]}
    step()
    with coordinated([], "incomplete"):
        try:
            exchange.saving.read(exchange.residuals[0])
        except ValueError as error:
            seen["error"] = str(error)
    return seen


def on_the_chief():
    """Saves on the chief alone, as in programs for Horovod and DDP, while other workers
    continue."""
    seen = {}
    if RANK == 0:
        fit(keras.callbacks.ModelCheckpoint("best.keras"))
        model.save("chief.keras")
        model.export("chief-served", verbose=False)
        seen = {"best.keras": held("best.keras"), "chief.keras": held("chief.keras")}
    else:
        fit()
    seen["sums"] = sums()
    step()
    setup.strategy.saves._wait = 3.0
    seen["own"] = own()
    if RANK == 0:
        model.save_weights("own.weights.h5")
        seen["own.weights.h5"] = held("own.weights.h5")
        checkpoint().write("own/checkpoint")
        seen["own checkpoint"] = held_by_checkpoint("own/checkpoint")
    step()
    model.optimizer.collect_state()
    if RANK == 0:
        model.save_weights("collected.weights.h5")
        seen["collected.weights.h5"] = held("collected.weights.h5")
    seen["sums of collected"] = sums()
    step()
    model.save_weights("after.weights.h5")  # all workers again
    seen["after.weights.h5"], seen["sums after"] = held("after.weights.h5"), sums()
    return seen


@tf.function
def step():
    @tf.autograph.experimental.do_not_convert
    def on_replica():
        rows = tf.constant(x[RANK * 8 : RANK * 8 + 8])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(rows) ** 2)
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)

    setup.strategy.run(on_replica)


def errors():
    """Collects the errors that all workers raise for unwritable and unreadable paths."""
    seen = {}
    try:
        model.save_weights("missing/m.weights.h5")
    except OSError as error:
        seen["no folder"] = str(error)
    if RANK == 0:
        with h5py.File("m.weights.h5", "w") as torn, h5py.File("after.weights.h5") as whole:
            for name in set(whole) - {"optimizer"}:
                whole.copy(name, torn)
    setup.strategy.reduce("SUM", tf.ones([]), axis=None)
    new_model().load_weights("m.weights.h5")
    return seen


LARGEST = 8 * 32  # elements of a variable, whose sums are compared


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("one path")


@pytest.fixture(scope="module")
def job(folder):
    return run_workers(PROGRAM, 2, [folder])


@pytest.fixture(scope="module")
def workers(job):
    return results(job)


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


if __name__ == "__main__":
    os.chdir(argument(1))
    setup = Setup("optimizer")
    x, y = digits(48)
    model = new_model()
    exchange = exchange_of(model)
    seen = {"all": on_all(), "alone": without_the_exchange()}
    seen |= {"chief": on_the_chief(), "errors": errors()}
    report({**seen, "is chief": gc.is_chief()})
