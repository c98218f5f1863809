"""`gc.Policy`: the layer kind of each variable, by rule and read off real models."""

import dataclasses
import re

import keras
import numpy as np
import pytest
from keras import layers

import tf_gradcomp as gc
from tf_gradcomp.policy import LAYER_KINDS, GradientSpec

CONVOLUTION, DENSE, RECURRENT, EMBEDDING, VECTOR = LAYER_KINDS


@pytest.mark.parametrize(
    ("path", "shape", "kind"),
    [
        ("dense/kernel", (3, 4), DENSE),
        ("dense/bias", (4,), VECTOR),
        ("scale", (), VECTOR),
        ("batch_normalization/gamma", (64,), VECTOR),
        ("conv2d/kernel", (3, 3, 8, 16), CONVOLUTION),
        ("conv1d/kernel", (3, 8, 16), CONVOLUTION),
        ("embedding/embeddings", (1000, 16), EMBEDDING),
        ("lstm/lstm_cell/kernel", (8, 64), RECURRENT),
        ("my_layer/recurrent_kernel", (8, 64), RECURRENT),
        ("bidirectional/forward_gru/gru_cell/kernel", (8, 64), RECURRENT),
        ("MyRNN/kernel", (8, 64), RECURRENT),
        ("multi_head_attention/query/kernel", (16, 2, 8), DENSE),
        ("block/self_attention/out/kernel", (2, 8, 16), DENSE),
        ("einsum_dense/kernel", (16, 2, 8), DENSE),
        ("kernel", (3, 4), DENSE),
        ("kernel", (3, 3, 3, 4), CONVOLUTION),
        ("lstm/bias", (64,), VECTOR),
        ("keypoint_net/conv2d/kernel", (3, 3, 8, 16), CONVOLUTION),
        ("char_lstm/dense/kernel", (8, 64), DENSE),
    ],
)
def test_the_rule_over_path_and_shape(path, shape, kind):
    assert gc.Policy().kind(path, shape) == kind


@pytest.mark.parametrize(
    "layer",
    [
        "multi_head_attention_1/anything",
        "self_attention",
        "selfAttention",
        "SelfAttention2D",
        "einsum_dense_3",
        "query",
        "key2",
        "value",
        "QKVEinsum",
        "attention.out",
        "MULTI-HEAD-ATTENTION",
    ],
)
def test_words_of_attention_make_a_projection(layer):
    assert gc.Policy().kind(f"model/{layer}/kernel", (16, 2, 8)) == DENSE


@pytest.mark.parametrize(
    "layer",
    ["keypoint_head/conv", "monkey", "values_conv", "keypoints2d", "conv_valued", "hotkeys"],
)
def test_words_that_only_begin_or_end_like_attention_words_do_not(layer):
    assert gc.Policy().kind(f"model/{layer}/kernel", (3, 3, 8, 16)) == CONVOLUTION


@pytest.mark.parametrize(
    "layer",
    [
        "lstm_2",
        "lstm2",
        "bidirectional/forward_lstm",
        "simple_rnn",
        "LSTMCell",
        "biLSTM",
        "MyGRU_1",
    ],
)
def test_words_of_recurrent_layers_make_a_recurrent_kernel(layer):
    assert gc.Policy().kind(f"model/{layer}/kernel", (8, 64)) == RECURRENT


@pytest.mark.parametrize("layer", ["congruent", "grunge", "learnn"])
def test_words_that_only_contain_the_name_of_a_recurrent_layer_do_not(layer):
    assert gc.Policy().kind(f"model/{layer}/kernel", (8, 64)) == DENSE


def test_given_kinds_go_ahead_of_the_rule():
    policy = gc.Policy({"head/kernel": "convolution"})
    assert policy.kind("head/kernel", (3, 4)) == CONVOLUTION
    assert policy.kind("tail/kernel", (3, 4)) == DENSE


def test_config_round_trips():
    policy = gc.Policy(
        {"a/kernel": "embedding"},
        positions={"b/kernel": 49},
        first="c/kernel",
        ends=("c/kernel", None),
        max_dense_elements=10,
    )
    assert gc.Policy(**policy.get_config()).get_config() == policy.get_config()
    assert gc.Policy().get_config() == {
        "kinds": {},
        "positions": {},
        "first": None,
        "ends": [None, None],
        "max_dense_elements": 2**26,
    }


# A layer of each kind: its input, and the kind of its variables of rank 2 and above.
LAYERS = {
    "Conv1D": (lambda: layers.Conv1D(4, 3), (10, 3), CONVOLUTION),
    "Conv2D": (lambda: layers.Conv2D(4, 3), (10, 10, 3), CONVOLUTION),
    "Conv3D": (lambda: layers.Conv3D(4, 3), (6, 6, 6, 3), CONVOLUTION),
    "Conv1DTranspose": (lambda: layers.Conv1DTranspose(4, 3), (10, 3), CONVOLUTION),
    "Conv2DTranspose": (lambda: layers.Conv2DTranspose(4, 3), (10, 10, 3), CONVOLUTION),
    "Conv3DTranspose": (lambda: layers.Conv3DTranspose(4, 3), (6, 6, 6, 3), CONVOLUTION),
    "DepthwiseConv1D": (lambda: layers.DepthwiseConv1D(3), (10, 3), CONVOLUTION),
    "DepthwiseConv2D": (lambda: layers.DepthwiseConv2D(3), (10, 10, 3), CONVOLUTION),
    "SeparableConv1D": (lambda: layers.SeparableConv1D(4, 3), (10, 3), CONVOLUTION),
    "SeparableConv2D": (lambda: layers.SeparableConv2D(4, 3), (10, 10, 3), CONVOLUTION),
    "ConvLSTM1D": (lambda: layers.ConvLSTM1D(4, 3), (5, 8, 3), CONVOLUTION),
    "ConvLSTM2D": (lambda: layers.ConvLSTM2D(4, 3), (5, 8, 8, 3), CONVOLUTION),
    "Dense": (lambda: layers.Dense(4), (7,), DENSE),
    "Dense on sequences": (lambda: layers.Dense(4), (5, 7), DENSE),
    "EinsumDense": (lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 4)), (5, 7), DENSE),
    "LSTM": (lambda: layers.LSTM(4), (5, 7), RECURRENT),
    "GRU": (lambda: layers.GRU(4), (5, 7), RECURRENT),
    "SimpleRNN": (lambda: layers.SimpleRNN(4), (5, 7), RECURRENT),
    "RNN of cells": (
        lambda: layers.RNN([layers.LSTMCell(4), layers.GRUCell(4)]),
        (5, 7),
        RECURRENT,
    ),
    "Bidirectional": (lambda: layers.Bidirectional(layers.LSTM(4)), (5, 7), RECURRENT),
    "TimeDistributed Conv2D": (
        lambda: layers.TimeDistributed(layers.Conv2D(4, 3)),
        (5, 8, 8, 3),
        CONVOLUTION,
    ),
    "TimeDistributed Dense": (lambda: layers.TimeDistributed(layers.Dense(4)), (5, 7), DENSE),
    "Embedding": (lambda: layers.Embedding(20, 4), (5,), EMBEDDING),
    "BatchNormalization": (lambda: layers.BatchNormalization(), (7,), None),
    "LayerNormalization": (lambda: layers.LayerNormalization(), (7,), None),
}


def kinds_by_model_and_rule(model):
    by_model, by_rule = gc.Policy.from_model(model), gc.Policy()
    assert set(by_model.kinds) == {variable.path for variable in model.trainable_variables}
    return [
        (v.path, v.shape, by_model.kind(v.path, v.shape), by_rule.kind(v.path, v.shape))
        for v in model.trainable_variables
    ]


@pytest.mark.parametrize(("make", "shape", "expected"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("form", ["sequential", "functional", "nested"])
def test_model_and_rule_agree_on_every_layer(make, shape, expected, form):
    inputs = keras.Input(shape)
    if form == "sequential":
        model = keras.Sequential([inputs, make()])
    else:
        model = keras.Model(inputs, make()(inputs))
    if form == "nested":
        outer = keras.Input(shape)
        model = keras.Model(outer, model(outer))
    kinds = kinds_by_model_and_rule(model)
    assert kinds
    for path, variable_shape, by_model, by_rule in kinds:
        assert by_model == (expected if len(variable_shape) > 1 else VECTOR), path
        assert by_rule == by_model, path


def test_model_and_rule_agree_on_attention():
    query, value = keras.Input((5, 16)), keras.Input((6, 16))
    model = keras.Model([query, value], layers.MultiHeadAttention(2, 8)(query, value))
    kinds = kinds_by_model_and_rule(model)
    assert {by_model for _, shape, by_model, _ in kinds if len(shape) == 3} == {DENSE}
    assert [by_model for *_, by_model, _ in kinds] == [by_rule for *_, by_rule in kinds]


@pytest.mark.parametrize("name", ["ResNet50", "MobileNetV2"])
def test_model_and_rule_agree_on_networks(name):
    model = getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3), classes=10)
    kinds = kinds_by_model_and_rule(model)
    for path, shape, by_model, by_rule in kinds:
        assert by_model == by_rule, path
        assert by_model == {1: VECTOR, 2: DENSE, 4: CONVOLUTION}[len(shape)], path


def test_names_that_tell_the_rule_nothing_are_read_off_the_model():
    inputs = keras.Input((5, 7))
    model = keras.Model(inputs, layers.EinsumDense("abc,cde->abde", (None, 2, 4), name="x")(inputs))
    ((path, shape, by_model, by_rule),) = kinds_by_model_and_rule(model)
    assert (path, len(shape), by_model, by_rule) == ("x/kernel", 3, DENSE, CONVOLUTION)


def test_variables_of_a_custom_layer_are_classified_by_the_rule():
    class Mine(layers.Layer):
        def build(self, _):
            self.kernel = self.add_weight(shape=(3, 3, 2, 2), name="kernel")
            self.table = self.add_weight(shape=(30, 2), name="embeddings")
            self.dense = layers.Dense(2)
            self.dense.build((None, 3))

        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((4,)), Mine()])
    assert [by_model for *_, by_model, _ in kinds_by_model_and_rule(model)] == [
        CONVOLUTION,
        EMBEDDING,
        DENSE,
        VECTOR,
    ]


def test_layers_that_share_weights():
    inputs = keras.Input((6,))
    dense = layers.Dense(6)
    kinds = kinds_by_model_and_rule(keras.Model(inputs, dense(dense(inputs))))
    assert [by_model for *_, by_model, _ in kinds] == [DENSE, VECTOR]


def test_a_model_that_is_not_built_is_refused():
    model = keras.Sequential([layers.Dense(3)], name="unbuilt")
    with pytest.raises(ValueError, match=r"'unbuilt' has no trainable variables; build the model"):
        gc.Policy.from_model(model)


def test_kinds_reach_the_exchange_and_its_bins():
    inputs = keras.Input((5, 7))
    model = keras.Model(inputs, layers.EinsumDense("abc,cde->abde", (None, 2, 4), name="x")(inputs))
    optimizer = gc.CompressedOptimizer("sgd", policy=gc.Policy.from_model(model))
    optimizer.build(model.trainable_variables)
    (spec,) = optimizer.exchange.specs
    assert spec == GradientSpec("x/kernel", (7, 2, 4), "float32", DENSE, end="first")
    assert optimizer.compressor.bin_sizes.of(spec) == 500


def test_patterns_override_what_the_policy_says():
    model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
    compressor = gc.compressors.AdaComp(overrides={r"^conv1_conv/": 20, r"predictions/": None})
    policy = gc.Policy.from_model(model)
    sizes = {
        v.path: compressor.bin_sizes.of(
            GradientSpec(v.path, tuple(v.shape), "float32", policy.kind(v.path, v.shape))
        )
        for v in model.trainable_variables
    }
    assert sizes["conv1_conv/kernel"] == sizes["conv1_conv/bias"] == 20
    assert sizes["predictions/kernel"] is sizes["predictions/bias"] is None
    assert set(sizes.values()) == {20, None, 50, 500}


def test_outputs_of_convolutions_and_the_first_one_are_read_off_a_model():
    inner = keras.Sequential(
        [keras.Input((6, 6, 8)), layers.DepthwiseConv2D(3, name="depthwise"), layers.Dense(4)],
        name="inner",
    )
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, name="first"),
            inner,
            layers.Conv2D(5, 2, strides=2, name="last"),
        ],
        name="outer",
    )
    policy = gc.Policy.from_model(model)
    assert policy.first == "outer/first/kernel"
    assert policy.positions == {
        "outer/first/kernel": 36,
        "inner/depthwise/kernel": 16,
        "outer/last/kernel": 4,
    }
    spec = policy.spec("outer/first/kernel", (3, 3, 3, 8), "float32")
    assert (spec.first, spec.positions) == (True, 36)


def test_both_ends_of_a_model_are_read_off_its_graph():
    inputs = keras.Input((6,))
    last = layers.Dense(3, name="last")  # made, and so named, ahead of the others
    hidden = layers.Dense(5, name="hidden")(layers.Dense(4, name="first")(inputs))
    model = keras.Model(inputs, last(layers.LayerNormalization()(hidden)), name="model")
    policy = gc.Policy.from_model(model)
    specs = {v.path: policy.spec(v.path, v.shape, "float32") for v in model.trainable_variables}
    ends = {path: spec.end for path, spec in specs.items() if spec.end}
    assert ends == {"first/kernel": "first", "last/kernel": "last"}
    named = gc.Policy(ends=("a/kernel", "b/kernel"))
    assert [named.spec(f"{name}/kernel", (2, 2), "float32").end for name in "abc"] == [
        "first",
        "last",
        None,
    ]


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (lambda: layers.LSTM(4), (3, 5), "/lstm_cell/kernel"),
        (lambda: layers.Bidirectional(layers.LSTM(4)), (3, 5), "/forward_.*/lstm_cell/kernel"),
        (lambda: layers.SeparableConv2D(4, 3), (8, 8, 2), "/depthwise_kernel"),
    ],
    ids=["LSTM", "Bidirectional", "SeparableConv2D"],
)
def test_of_a_first_layer_with_several_kernels_it_is_the_one_for_its_inputs(make, shape, expected):
    model = keras.Sequential([keras.Input(shape), make(), layers.Flatten(), layers.Dense(3)])
    policy = gc.Policy.from_model(model)
    assert re.search(f"{expected}$", policy.first_kernel)
    assert policy.last_kernel == model.layers[-1].kernel.path
    assert policy.first == (policy.first_kernel if "depthwise" in expected else None)


def test_of_attention_in_the_first_layer_it_is_the_first_projection():
    inputs = keras.Input((4, 8))
    attention = layers.MultiHeadAttention(2, 4)(inputs, inputs)
    policy = gc.Policy.from_model(keras.Model(inputs, layers.Dense(3)(attention)))
    assert policy.first_kernel.endswith("query/kernel")


def test_sizes_of_outputs_that_are_not_known_are_left_out():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.convolution = keras.layers.Conv2D(4, 3)

        def call(self, x):
            return self.convolution(x)

    model = Subclassed()
    model(np.zeros((1, 8, 8, 3), "float32"))
    policy = gc.Policy.from_model(model)
    assert policy.positions == {}
    assert policy.first == model.convolution.kernel.path


OF_MODEL = gc.Policy(
    {"sequential/conv/kernel": "dense", "sequential/cell/kernel": "recurrent"},
    positions={"sequential/conv/kernel": 64},
    first="sequential/conv/kernel",
    ends=["sequential/conv/kernel", "sequential/out/kernel"],
    max_dense_elements=9,
)


@pytest.mark.parametrize(
    ("policy", "prefix"),
    [
        (OF_MODEL, "sequential/"),
        (OF_MODEL, ""),
        (OF_MODEL, "sequential_1/"),
        (OF_MODEL.for_paths(["conv/kernel", "cell/kernel", "out/kernel"]), "sequential/"),
    ],
    ids=["same", "lost", "other", "gained"],
)
def test_a_policy_follows_variables_of_a_model_with_another_name(policy, prefix):
    paths = [f"{prefix}{layer}/kernel" for layer in ("conv", "other", "cell", "out")]
    followed = policy.for_paths(paths)
    conv, other, cell, out = (followed.spec(path, (5, 5, 8, 8), "float32") for path in paths)
    assert (conv.kind, conv.positions, conv.first, conv.end) == ("dense", 64, True, "first")
    assert (other.kind, other.positions, other.first, other.end) == (
        "convolution",
        None,
        False,
        None,
    )
    assert (cell.kind, out.end) == ("recurrent", "last")
    assert followed.max_dense_elements == 9


@pytest.mark.parametrize(
    "paths",
    [
        ["kernel", "bias"],
        ["a/conv/kernel", "b/conv/kernel"],  # both might be meant
        ["sequential/conv/kernel", "conv/kernel"],  # one is
    ],
)
def test_a_policy_stays_as_it_is_where_nothing_or_too_much_is_alike(paths):
    assert OF_MODEL.for_paths(paths) is OF_MODEL


def test_a_sequential_model_that_is_loaded_has_the_settings_of_its_policy(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Conv2D(8, 3),
            layers.Conv2D(8, 3),
            layers.Reshape((64, 8)),
            layers.RNN(layers.GRUCell(16)),
            layers.Dense(3),
        ]
    )
    model.compile(gc.CompressedOptimizer("adam", "scalecom", gc.Policy.from_model(model)), "mse")
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    specs = [each.optimizer.exchange.specs for each in (model, loaded)]
    without_paths = [[dataclasses.replace(spec, path="") for spec in each] for each in specs]
    assert without_paths[0] == without_paths[1]
    assert {spec.positions for spec in specs[1]} > {None}
    assert {spec.kind for spec in specs[1]} >= {"convolution", "recurrent", "dense"}
