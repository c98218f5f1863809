"""`GRADCOMP_COMPRESSOR` runs an unchanged program with another method."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.workers import result, run_workers
from tf_gradcomp.cli.simulate import simulate
from tf_gradcomp.environment import COMPRESSOR
from tf_gradcomp.groups import messages

JOB = """
    import json, os, logging, sys, tempfile

    import keras
    import numpy as np

    import tf_gradcomp as gc

    logging.basicConfig(stream=sys.stdout)
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = gc.MultiWorkerMirroredStrategy()
    x = np.random.default_rng(0).normal(size=(64, 20)).astype("float32")

    def trained(method, loaded_from=None, **environment):
        os.environ.pop("GRADCOMP_COMPRESSOR", None)
        os.environ.update({f"GRADCOMP_{name}": text for name, text in environment.items()})
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.layers.Dense(30), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((20,)), *layers])
            model.compile(gc.CompressedOptimizer(keras.optimizers.Adam(0.01), method), "mse")
            model.optimizer.build(model.trainable_variables)
            if loaded_from:
                model.load_weights(loaded_from)
        model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0, shuffle=False)
        return model

    replaced = trained("adacomp", COMPRESSOR="no_compression")
    dense, own = trained("no_compression"), trained("adacomp")
    path = os.path.join(tempfile.mkdtemp(), "own.weights.h5")
    own.save_weights(path)
    resumed = trained("adacomp", path, COMPRESSOR="no_compression")
    resumed_dense = trained("no_compression", path)
    equal = lambda a, b: all(map(np.array_equal, a.get_weights(), b.get_weights()))
    report = {
        "as dense": equal(replaced, dense),
        "as adacomp": equal(replaced, own),
        "resumed as dense": equal(resumed, resumed_dense),
        "method": replaced.optimizer.compressor.name,
        "saved": replaced.optimizer.get_config()["compressor"]["name"],
    }
    try:
        trained("adacomp", COMPRESSOR="adacomp" if rank else "cast")
    except gc.WorkersDisagreeError as error:
        report["differ"] = str(error)
    with open(os.environ["RESULT_PATH"] + ".json", "w") as file:
        json.dump(report, file)
"""


def test_the_job_equals_a_job_with_the_other_method():
    workers = run_workers(JOB, 2)
    for worker in workers:
        report = result(worker)
        assert "GRADCOMP_COMPRESSOR: worker 0 has 'cast', worker 1 has 'adacomp'" in report.pop(
            "differ"
        )
        assert report == {
            "as dense": True,
            "as adacomp": False,
            "resumed as dense": True,
            "method": "no_compression",
            "saved": "adacomp",
        }
    says = "exchanged by 'no_compression', in place of the program's own 'adacomp'"
    assert workers[0].stdout.count(says) == 1


def test_a_strategy_has_the_other_method(monkeypatch):
    monkeypatch.setenv(COMPRESSOR, "top_k(density=0.5)")
    method = gc.MultiWorkerMirroredStrategy(compressor="adacomp").compressor
    assert (method.name, gc.MultiWorkerMirroredStrategy().compressor) == ("top_k", None)


def test_a_wrong_text_names_the_variable(monkeypatch):
    monkeypatch.setenv(COMPRESSOR, "adcomp")
    with pytest.raises(ValueError, match=r"GRADCOMP_COMPRESSOR='adcomp': .* 'adacomp'\?"):
        gc.CompressedOptimizer("sgd")
    monkeypatch.setenv(COMPRESSOR, "")
    assert gc.CompressedOptimizer("sgd").compressor.name == "adacomp"


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_variable_without_effect_is_reported(monkeypatch, caplog, wrapped):
    monkeypatch.setenv(COMPRESSOR, "cast")
    messages.forget()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(gc.CompressedOptimizer("sgd") if wrapped else "sgd", "mse")
    model.fit(tf.ones((4, 2)), tf.ones((4, 1)), verbose=0)
    assert ("GRADCOMP_COMPRESSOR=cast has no effect" in caplog.text) == (not wrapped)


def test_it_is_what_a_simulation_compares_by_default(monkeypatch):
    (option,) = (param for param in simulate.params if param.name == "compressor")
    assert option.default() == ["no_compression", "adacomp"]
    monkeypatch.setenv(COMPRESSOR, "qsgd")
    assert option.default() == ["no_compression", "qsgd"]
