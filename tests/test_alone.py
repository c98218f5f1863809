"""A program that is one of several processes does not train alone without an error."""

from __future__ import annotations

import json
import sys
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.workers import run_workers
from tf_gradcomp.groups import current

CLUSTER = {"worker": ["a:1", "b:1"]}
LAUNCHERS_SIZES = ["HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]


@pytest.fixture(autouse=True)
def _has_trained_with_nobody(monkeypatch):
    monkeypatch.setattr(current, "_trained_with_others", threading.Event())


def take_a_step():
    variable = keras.Variable(np.zeros(3, "float32"), name="kernel")
    optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.ones(3)], [variable])
    return variable.numpy()


def set_tf_config(monkeypatch, cluster, task_type, index=0):
    text = json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})
    monkeypatch.setenv("TF_CONFIG", text)


def import_horovod(monkeypatch, name="horovod.tensorflow", initialized=True, size=1):
    def asked_too_early():
        raise ValueError("Horovod has not been initialized; use hvd.init().")

    interface = types.ModuleType(name)
    interface.is_initialized = lambda: initialized
    interface.size = (lambda: size) if initialized else asked_too_early
    monkeypatch.setitem(sys.modules, "horovod", types.ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, "horovod.common", types.ModuleType("horovod.common"))
    monkeypatch.setitem(sys.modules, name, interface)


@pytest.mark.parametrize(
    ("cluster", "task_type"),
    [(CLUSTER, "worker"), ({"chief": ["a:1"], "worker": ["b:1"]}, "chief")],
)
def test_one_of_several_workers_is_refused_without_a_strategy(monkeypatch, cluster, task_type):
    set_tf_config(monkeypatch, cluster, task_type)
    message = r"TF_CONFIG names 2 workers.*train alone.*MultiWorkerMirroredStrategy.*unset"
    with pytest.raises(ValueError, match=message):
        take_a_step()


@pytest.mark.parametrize(
    ("cluster", "task_type"),
    [
        ({"worker": ["a:1"]}, "worker"),
        ({"worker": ["a:1"], "evaluator": ["b:1"]}, "worker"),
        ({**CLUSTER, "evaluator": ["c:1"]}, "evaluator"),
        ({**CLUSTER, "ps": ["c:1"]}, "ps"),
    ],
)
def test_a_process_that_is_alone_by_design_trains(monkeypatch, cluster, task_type):
    set_tf_config(monkeypatch, cluster, task_type)
    np.testing.assert_array_equal(take_a_step(), -np.ones(3))


def test_under_a_strategy_nothing_is_refused(monkeypatch):
    set_tf_config(monkeypatch, CLUSTER, "worker")
    import_horovod(monkeypatch, size=2)
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        variable = keras.Variable(np.zeros(3, "float32"), name="kernel")
        optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([variable])
    strategy.run(lambda: optimizer.apply([tf.ones(3)], [variable]))
    np.testing.assert_array_equal(variable.numpy(), -np.ones(3))


def test_a_model_may_be_loaded_without_a_strategy(monkeypatch, tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(gc.CompressedOptimizer("sgd"), "mse")
    model.fit(tf.ones((4, 2)), tf.ones((4, 1)), verbose=0)
    model.save(tmp_path / "model.keras")
    set_tf_config(monkeypatch, CLUSTER, "worker")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.predict(tf.ones((4, 2)), verbose=0).shape == (4, 1)
    with pytest.raises(ValueError, match="would train alone"):
        loaded.fit(tf.ones((4, 2)), tf.ones((4, 1)), verbose=0)


@pytest.mark.parametrize(
    ("processes", "horovod_size"), [(2, 2), (1, 2)], ids=["all", "a set of one"]
)
def test_ranks_of_horovod_are_not_alone_where_tf_config_is_set_as_well(
    monkeypatch, processes, horovod_size
):
    set_tf_config(monkeypatch, CLUSTER, "worker", 1)
    import_horovod(monkeypatch, size=horovod_size)
    current.check_not_single_by_mistake(
        types.SimpleNamespace(processes=types.SimpleNamespace(size=processes))
    )


@pytest.mark.parametrize("index", [0, 1])
def test_after_a_job_the_chief_may_continue_alone(monkeypatch, index):
    """As in TensorFlow's tutorial; where all forgot the scope, each would train another model."""
    current._trained_with_others.set()
    set_tf_config(monkeypatch, CLUSTER, "worker", index)
    if index == 0:
        np.testing.assert_array_equal(take_a_step(), -np.ones(3))
        return
    with pytest.raises(ValueError, match="would train alone"):
        take_a_step()


@pytest.mark.parametrize(
    "name", ["horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"]
)
def test_one_of_several_processes_of_horovod_is_refused(monkeypatch, name):
    import_horovod(monkeypatch, name, size=4)
    message = rf"{name} says that this is one of 4 processes.*would train alone.*gradcomp run"
    with pytest.raises(ValueError, match=message):
        take_a_step()


def test_one_process_of_horovod_trains(monkeypatch):
    import_horovod(monkeypatch, size=1)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")  # Horovod knows better
    np.testing.assert_array_equal(take_a_step(), -np.ones(3))


def test_processes_of_mpi_that_a_horovod_without_mpi_cannot_see_are_refused(monkeypatch):
    import_horovod(monkeypatch, size=1)
    sys.modules["horovod.tensorflow"].mpi_built = lambda: False
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"one of 2 processes, but Horovod was built without MPI"):
        take_a_step()


@pytest.mark.parametrize("variable", LAUNCHERS_SIZES)
def test_a_launchers_size_counts_where_horovod_is_imported(monkeypatch, variable):
    import_horovod(monkeypatch, initialized=False)
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ValueError, match=rf"{variable} says that this is one of 2 processes"):
        take_a_step()
    monkeypatch.setenv(variable, "1")
    np.testing.assert_array_equal(take_a_step(), -np.ones(3))


def test_horovods_own_launcher_counts_also_where_horovod_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "horovod", raising=False)  # other tests may have loaded it
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(ValueError, match="HOROVOD_SIZE says that this is one of 2 processes"):
        take_a_step()


def test_a_strategy_is_refused_where_horovods_launcher_started_several(monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match="each of them would train alone"):
        gc.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize("variable", LAUNCHERS_SIZES[1:])
def test_a_launcher_of_other_programs_does_not_matter(monkeypatch, variable):
    monkeypatch.delitem(sys.modules, "horovod", raising=False)  # other tests may have loaded it
    monkeypatch.setenv(variable, "2")
    np.testing.assert_array_equal(take_a_step(), -np.ones(3))


def test_a_simulation_is_alone_by_design(monkeypatch):
    set_tf_config(monkeypatch, CLUSTER, "worker")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    report = gc.simulation.Learners(model, 2).train_on_batch(tf.ones((4, 2)), tf.ones((4, 1)))
    assert np.isfinite(report.loss)


WITHOUT_A_SCOPE = """
    import keras
    import tensorflow as tf
    import tf_gradcomp as gc

    gc.MultiWorkerMirroredStrategy()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(gc.CompressedOptimizer("sgd"), "mse")
    model.fit(tf.ones((4, 2)), tf.ones((4, 1)), verbose=0)
"""


def test_a_job_whose_program_forgot_the_scope_ends_with_the_reason():
    for worker in run_workers(WITHOUT_A_SCOPE, check=False):
        assert worker.returncode == 1
        assert "each of its 2 workers would train the model alone" in worker.stderr


FIRST_TOGETHER = """
    import keras
    import tensorflow as tf
    import tf_gradcomp as gc

    def fit():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(gc.CompressedOptimizer("sgd"), "mse")
        model.fit(tf.ones((4, 2)), tf.ones((4, 1)), verbose=0)

    strategy = gc.MultiWorkerMirroredStrategy()
    with strategy.scope():
        fit()
    if gc.is_chief(strategy):
        fit()
"""


def test_a_worker_that_has_trained_with_the_others_may_train_alone_afterwards():
    run_workers(FIRST_TOGETHER)
