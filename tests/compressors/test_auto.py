"""The choice between methods: its settings, and where there is none."""

import json

import keras
import pytest

import tf_gradcomp as gc
from tests.replicas import mirrored
from tf_gradcomp import compressors
from tf_gradcomp.compressors import Auto


def names(auto):
    return [candidate.name for candidate in auto.candidates]


def test_default_candidates():
    assert names(compressors.get("auto")) == ["no_compression", "cast", "adacomp"]


def test_with_adam_as_it_is_what_lags_is_no_default_candidate():
    def of(auto, precondition, inner="adam", **settings):
        optimizer = gc.CompressedOptimizer(inner, auto, precondition=precondition, **settings)
        return [candidate.compressor.name for candidate in optimizer.exchange._method.candidates]

    assert of("auto", "auto") == of("auto", None, "sgd") == ["no_compression", "cast", "adacomp"]
    assert of("auto", None) == ["no_compression", "cast"]
    assert of("auto", "auto", "muon") == ["no_compression", "cast"]  # partly AdamW, never divided
    assert of("auto", "auto", "muon", local_steps=4) == ["no_compression", "cast", "adacomp"]
    assert of(Auto(["adacomp", "top_k"]), None) == ["adacomp", "top_k"]  # the user's choice


def test_candidates_are_names_configs_or_compressors():
    config = compressors.serialize(compressors.TopK(0.25))
    auto = Auto(["cast", config, compressors.AdaComp(77)])
    assert names(auto) == ["cast", "top_k", "adacomp"]
    assert names(compressors.get('auto(candidates=["cast", "top_k(density=0.5)"])')) == [
        "cast",
        "top_k",
    ]


def test_the_config_has_the_candidates():
    auto = Auto(["cast", compressors.AdaComp(77)])
    copy = compressors.deserialize(json.loads(json.dumps(compressors.serialize(auto))))
    assert isinstance(copy, Auto)
    assert copy.get_config() == auto.get_config()


def test_a_simulation_has_no_network_to_choose_by():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="'auto' chooses by the network"):
        gc.simulation.Learners(model, 2, "auto")


def test_replicas_that_copy_have_no_network_to_choose_by():
    with mirrored(2).scope():
        variable = keras.Variable([1.0, 2.0])
        optimizer = gc.CompressedOptimizer("sgd", "auto")
        with pytest.raises(ValueError, match="no network whose collectives could be timed"):
            optimizer.build([variable])


def test_one_replica_chooses_nothing():
    variable = keras.Variable([1.0, 2.0])
    optimizer = gc.CompressedOptimizer("sgd", "auto")
    optimizer.build([variable])
    assert isinstance(optimizer.compressor, Auto)
    assert optimizer.exchange.setup.residual_scale is None


ONE_IN_FOUR = {**compressors.TopK().get_config()["density"], "dense": 0.25}


@pytest.mark.parametrize(
    ("compressor", "text"),
    [
        (compressors.AdaComp(), "adacomp"),
        (compressors.AdaComp(scale_factor=3.0), "adacomp(scale_factor=3.0)"),
        (compressors.Cast("bfloat16"), "cast(dtype='bfloat16')"),
        (compressors.TopK(density=0.25), "top_k(density=0.25)"),
        (compressors.TopK(density={"dense": 0.25}), f"top_k(density={ONE_IN_FOUR})"),
    ],
)
def test_the_text_of_a_compressor_is_short_and_means_it(compressor, text):
    assert compressors.text_of(compressor) == text
    assert compressors.get(text).get_config() == compressor.get_config()


def test_a_warmup_is_in_the_text():
    compressor = compressors.ScaleCom(warmup_steps=3, warmup="cast")
    assert compressors.get(compressors.text_of(compressor)).get_config() == compressor.get_config()
