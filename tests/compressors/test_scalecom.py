"""Tests ScaleCom's identities and rates; test_conformance.py tests all compressors."""

import keras
import numpy as np
import pytest

from tests.bounds import assert_close
from tests.compressors.lockstep import Lockstep, specs_of
from tests.reference.leader import leader
from tf_gradcomp.compressors import AdaComp, ScaleCom
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.keras.common.model_policy import Policy
from tf_gradcomp.policy import GradientSpec


def normal(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def steps_of(compressor, gradients):
    """Outcomes of steps; `gradients` by step, replica and tensor."""
    lockstep = Lockstep(compressor, specs_of(gradients[0][0]), len(gradients[0]))
    return [lockstep.step(gradient) for gradient in gradients]


def test_golden_run():
    gradients = np.float32(
        [
            [[4, 1, 0, -2], [1, 3, 0, 1]],
            [[0, 2, 1, 1], [2, 5, 0, -8]],
            [[1, 1, 1, 1], [1, 1, 1, 1]],
        ]
    )
    outcomes = steps_of(ScaleCom(4, beta=0.5), [[[g] for g in step] for step in gradients])
    sent = [outcome.reduced[0][0].tolist() for outcome in outcomes]
    assert sent == [[5, 0, 0, 0], [0, 0, 0, -7.5], [0, 7.5, 0, 0]]  # sums of two replicas
    left = [state[RESIDUAL][0].tolist() for state in outcomes[-1].state]
    assert left == [[0.5, 0.75, 1, 0], [1.5, 2, 0.5, 0.75]]


@pytest.mark.parametrize("beta", [1.0, 0.3, 0.1])
def test_sent_and_backlog_are_all_gradients(beta):
    gradients = [[[normal((40, 30), 7 * t + i)] for i in range(4)] for t in range(30)]
    outcomes = steps_of(ScaleCom(25, beta=beta), gradients)
    sent = sum(np.float64(outcome.reduced[0][0]) for outcome in outcomes)
    backlog = sum(np.float64(state[RESIDUAL][0]) for state in outcomes[-1].state) / beta
    total = sum(np.float64(g) for step in gradients for (g,) in step)
    # The filter multiplies and divides in each step, and four replicas are added up.
    largest = max(np.abs(backlog).max(), np.abs(sent).max())
    assert_close(sent + backlog, total, terms=4 + 4, steps=30, scale=largest)


def test_a_filtered_residual_is_not_cleared_where_it_is_sent():
    gradients = [[[normal(60, i)] for i in range(2)] for _ in range(2)]
    first, second = steps_of(ScaleCom(20, beta=0.5), gradients)
    chosen = second.reduced[0][0] != 0
    before, after = first.state[0][RESIDUAL][0], second.state[0][RESIDUAL][0]
    np.testing.assert_array_equal(after[chosen], np.float32(0.5) * before[chosen])
    assert after[chosen].any()


def test_choosing_and_adding_commute():
    gradients = [[np.float32(np.round(normal((33, 31), i) * 64) / 64)] for i in range(4)]
    (separate,) = steps_of(ScaleCom(25), [gradients])
    total = sum(g for (g,) in gradients)
    chosen = separate.reduced[0][0] != 0
    assert chosen.sum() == -(-33 * 31 // 25)
    np.testing.assert_array_equal(separate.reduced[0][0], np.where(chosen, total, 0))


def test_replicas_lead_in_turn():
    peaks = np.zeros((3, 20), np.float32)
    peaks[[0, 1, 2], [4, 9, 14]] = 1.0
    outcomes = steps_of(ScaleCom(20), [[[peak] for peak in peaks]] * 12)
    indices = [int(np.flatnonzero(outcome.reduced[0][0])[0]) for outcome in outcomes]
    assert sorted(indices[:3]) == [4, 9, 14]
    assert indices == [[4, 9, 14][leader(step, 3)] for step in range(12)]


def test_at_rate_1_it_is_the_dense_sum():
    gradients = [[[normal((5, 7), 3 * t + i)] for i in range(3)] for t in range(2)]
    for outcome, step in zip(steps_of(ScaleCom(1), gradients), gradients, strict=True):
        (a,), (b,), (c,) = step
        np.testing.assert_array_equal(outcome.reduced[0][0], a + b + c)
        assert not any(state[RESIDUAL][0].any() for state in outcome.state)


@pytest.mark.parametrize("value_bits", [32, 16, 4])
def test_a_small_variable_is_sent_despite_large_gradients(value_bits):
    """A head of two outputs or a LayerNorm scale would wait for ever in a chunk with others."""
    shapes = {"a/kernel": (30, 40), "a/bias": (40,), "b/bias": (2,), "b/kernel": (40, 10)}
    specs = [Policy().spec(path, shape, "float32") for path, shape in shapes.items()]
    lockstep = Lockstep(ScaleCom(value_bits=value_bits), specs, 2)
    size = {"a/bias": 1e6, "b/bias": 1e-3}
    ones = [np.full(shape, size.get(path, 1), np.float32) for path, shape in shapes.items()]
    sums = np.zeros(2)
    for step in range(1, 11):
        outcome = lockstep.step([ones, ones])
        assert [np.count_nonzero(tensor) for tensor in outcome.reduced[0]] == [3, 2, 1, 1]
        sums += outcome.reduced[0][2]
        # The first entry has all gradients so far, the other all gradients before this step.
        assert_close(np.sort(sums), [2e-3 * (step - 1), 2e-3 * step], terms=4, steps=step)


@pytest.mark.parametrize("value_bits", [32, 16, 4])
def test_a_variable_of_one_element_is_sent_in_every_step(value_bits):
    compressor = ScaleCom(value_bits=value_bits)
    shapes = {"a/scale": (1,), "a/bias": (100,), "b/scale": (), "b/kernel": (1, 1)}
    values = {"a/scale": 0.01, "b/scale": 0.02, "b/kernel": 0.03}
    specs = [Policy().spec(path, shape, "float32") for path, shape in shapes.items()]
    lockstep = Lockstep(compressor, specs, 2)
    for step in range(5):
        gradients = [
            np.full(shape, values[path], np.float32) if path in values else normal(shape, step)
            for path, shape in shapes.items()
        ]
        outcome = lockstep.step([gradients, gradients])
        sent = [outcome.reduced[0][index].item() for index in (0, 2, 3)]
        assert_close(sent, [0.02, 0.04, 0.06], terms=2)
        assert [outcome.tensor_bytes[0][index] for index in (0, 2, 3)] == [4, 4, 4]


def bytes_of(compressor, size):
    gradients = [[normal((200, 400), i)] for i in range(size)]
    lockstep = Lockstep(compressor, specs_of(gradients[0]), size)
    for _ in range(3):
        outcome = lockstep.step(gradients)
    return outcome


@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_bytes_do_not_grow_with_the_number_of_replicas(size):
    outcome = bytes_of(ScaleCom(400), size)
    chunks, bits = 200, 9
    offsets = 4 * -(-chunks * bits // 32)
    assert outcome.payload_bytes == [offsets // size + 4 * (chunks + 1)] * size
    # Each passes on the offsets, and twice its part of the values and the flag.
    values = 2 * (size - 1) * 4 * (chunks + 1) // size
    assert outcome.sent_bytes == [(size - 1) * offsets // size + values] * size


def test_gathered_bytes_do_grow():
    few, many = (bytes_of(AdaComp(500), size).sent_bytes[0] for size in (2, 16))
    assert many > 10 * few


def test_payload_ratio_counts_values_and_offset_bits():
    for rate, expected in ((25, 21.6), (50, 42.1), (400, 312)):
        gradients = [[normal(40_000_0, 0)]]
        lockstep = Lockstep(ScaleCom(rate), specs_of(gradients[0]), 1)
        ratio = 4 * 400_000 / lockstep.step(gradients).payload_bytes[0]
        assert ratio == pytest.approx(expected, rel=2e-3)


def rate_of(model):
    policy = Policy.from_model(model)
    specs = [policy.spec(v.path, v.shape, "float32") for v in model.trainable_variables]
    compressor = ScaleCom()
    rates, sizes = compressor.settings(specs), [spec.elements for spec in specs]
    return sum(sizes) / sum(-(-size // rate) for size, rate in zip(sizes, rates, strict=True))


def residual_network(blocks, bottleneck):
    """The ResNet of the paper: stride in the 3x3 convolution, no biases in convolutions."""
    layers = keras.layers

    def convolve(x, filters, size, stride=1):
        x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    def block(x, filters, stride):
        widths = [(filters, 1, 1), (filters, 3, stride), (4 * filters, 1, 1)]
        if not bottleneck:
            widths = [(filters, 3, stride), (filters, 3, 1)]
        y = x
        for i, (width, size, by) in enumerate(widths):
            y = convolve(y if i == 0 else layers.ReLU()(y), width, size, by)
        if stride > 1 or x.shape[-1] != y.shape[-1]:
            x = convolve(x, y.shape[-1], 1, stride)
        return layers.ReLU()(layers.Add()([x, y]))

    inputs = keras.Input((224, 224, 3))
    x = layers.ReLU()(convolve(inputs, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, index in enumerate(blocks):
        for i in range(index):
            x = block(x, 64 * 2**stage, 2 if stage and i == 0 else 1)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(1000)(x))


@pytest.mark.parametrize(
    ("build", "rate"),
    [
        (lambda: residual_network([3, 4, 6, 3], bottleneck=True), 96.7),
        (lambda: keras.applications.ResNet50(weights=None), 100.8),
        (lambda: keras.applications.MobileNetV2(weights=None), 157.4),
        (lambda: residual_network([2, 2, 2, 2], bottleneck=False), 115.9),
    ],
    ids=["ResNet-50 of the paper", "ResNet-50 of Keras", "MobileNetV2", "ResNet-18"],
)
def test_the_rule_gives_the_rates_of_the_paper(build, rate):
    assert rate_of(build()) == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "rate"),
    [((7, 7, 3, 64), 1), ((3, 3, 64, 64), 25), ((3, 3, 256, 512), 50), ((1, 1, 512, 2048), 400)],
)
def test_without_a_model_the_channels_of_a_convolution_decide(shape, rate):
    spec = GradientSpec("conv/kernel", shape, "float32", "convolution")
    assert ScaleCom().settings([spec]) == [rate]


@pytest.mark.parametrize(
    ("kind", "shape", "rate"),
    [
        ("dense", (128, 10), 400),
        ("dense", (64, 4, 16), 50),
        ("recurrent", (64, 256), 400),
        ("embedding", (1000, 64), 50),
        ("vector", (64,), 25),
    ],
)
def test_rates_of_other_layers(kind, shape, rate):
    spec = GradientSpec("layer/kernel", shape, "float32", kind)
    assert ScaleCom().settings([spec]) == [rate]
