"""Tests properties of PowerSGD alone; test_conformance has the others."""

import numpy as np
import pytest

from tests.bounds import assert_close, rounding
from tests.compressors.lockstep import Lockstep, assert_equal_bits, specs_of
from tests.compressors.methods import METHODS
from tests.compressors.test_conformance import conserved
from tf_gradcomp.compressors import PowerSGD
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.compressors.power_sgd import ALTERNATING_FACTOR, FACTOR
from tf_gradcomp.policy import GradientSpec

both = pytest.mark.parametrize(
    ("compressor", "name"),
    [(PowerSGD(), FACTOR), (PowerSGD(alternate=True), ALTERNATING_FACTOR)],
    ids=["", "alternating"],
)


def spec(*shape, path="dense/kernel"):
    return GradientSpec(path, shape, "float32", "dense")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def low_rank(rows, columns, rank, seed=0):
    return normal(rows, rank, seed=seed) @ normal(rank, columns, seed=seed + 1)


def lockstep_of(compressor, gradients):
    return Lockstep(compressor, specs_of(gradients[0]), len(gradients))


def convolution(size, inputs, outputs):
    return [(size, size, inputs, outputs)]


def normalization(channels):
    return [(channels,)] * 2


def resnet18_shapes():
    """For 100 classes, its first convolution that for CIFAR."""
    shapes = [*convolution(3, 3, 64), *normalization(64)]
    inputs = 64
    for outputs in (64, 128, 256, 512):
        for _ in range(2):
            for block_inputs in (inputs, outputs):
                shapes += [*convolution(3, block_inputs, outputs), *normalization(outputs)]
            if inputs != outputs:
                shapes += [*convolution(1, inputs, outputs), *normalization(outputs)]
            inputs = outputs
    return [*shapes, (512, 100), (100,)]


def resnet50_shapes(biases):
    def unit(size, inputs, outputs):
        bias = [(outputs,)] if biases else []
        return [*convolution(size, inputs, outputs), *bias, *normalization(outputs)]

    shapes = unit(7, 3, 64)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            if block == 0:
                shapes += unit(1, inputs, outputs)
            shapes += unit(1, inputs, width) + unit(3, width, width) + unit(1, width, outputs)
            inputs = outputs
    return [*shapes, (2048, 1000), (1000,)]


@pytest.mark.parametrize(
    ("shapes", "parameters", "ratios"),
    [
        (resnet18_shapes(), 11_220_132, {4: 72.22, 2: 135.95}),
        (resnet50_shapes(biases=False), 25_557_032, {4: 66.54, 2: 116.64}),
        (resnet50_shapes(biases=True), 25_583_592, {4: 62.30, 2: 104.14}),
    ],
    ids=["ResNet18", "ResNet50", "ResNet50 of Keras"],
)
def test_counted_bytes_equal_the_bytes_that_lgreco_counts(shapes, parameters, ratios):
    """Markov et al., "L-GreCo", MLSys 2024, Table 2 and 8: 72.2 and 66.5 for rank 4."""
    gradients = [[np.zeros(shape, np.float32) for shape in shapes]]
    assert sum(gradient.size for gradient in gradients[0]) == parameters
    for rank, ratio in ratios.items():
        outcome = lockstep_of(PowerSGD(rank), gradients).step(gradients)
        assert 4 * parameters / outcome.tensor_bytes[0].sum() == pytest.approx(ratio, abs=0.005)
        assert outcome.payload_bytes[0] == outcome.tensor_bytes[0].sum() + 4  # the flag


@pytest.mark.parametrize(
    ("shape", "rank"),
    [
        ((), 0),
        ((1000,), 0),
        ((0, 500), 0),
        ((16, 16), 0),  # 8 (16 + 16) is all of it
        ((16, 17), 4),
        ((3, 1000), 0),
        ((3, 3, 64, 64), 4),
        ((4, 4, 17), 4),  # as (16, 17)
        ((17, 4, 4), 0),  # as (68, 4)
    ],
    ids=str,
)
def test_vectors_and_what_would_not_become_half_as_large_are_sent_whole(shape, rank):
    compressor = PowerSGD()
    assert compressor.settings([spec(*shape)])[0] == rank
    factor = compressor.state(spec(*shape))[FACTOR]
    assert factor.shape == ((shape[-1], rank) if rank else (0,))
    assert factor.shared


def test_rank_by_kind_and_by_override():
    compressor = PowerSGD({"dense": 2}, overrides={"^first/": None, "^last/": 8})
    assert compressor.settings([spec(100, 100)])[0] == 2
    assert compressor.settings([GradientSpec("c", (100, 100), "float32", "recurrent")])[0] == 4
    assert compressor.settings([spec(100, 100, path="first/kernel")])[0] == 0
    assert compressor.settings([spec(100, 100, path="last/kernel")])[0] == 8


@both
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**60], ids=["tiny", "huge"])
def test_the_scale_of_gradients_changes_nothing_else(compressor, name, scale):
    steps = [[[normal(90, 60, seed=3 * seed + i)] for i in range(3)] for seed in range(4)]
    plain, scaled = (lockstep_of(compressor, steps[0]) for _ in range(2))
    scale = np.float32(scale)
    for gradients in steps:
        expected = plain.step(gradients)
        actual = scaled.step(
            [[scale * g for g in replica_gradients] for replica_gradients in gradients]
        )
        assert_equal_bits(actual.reduced[0][0], scale * expected.reduced[0][0])
        assert_equal_bits(actual.residuals[1][0], scale * expected.residuals[1][0])
        assert_equal_bits(actual.state[0][name][0], expected.state[0][name][0])


@pytest.mark.parametrize("true_rank", [1, 3, 4])
def test_a_gradient_of_no_higher_rank_is_sent_at_once(true_rank):
    gradients = [[low_rank(300, 200, true_rank)] for _ in range(3)]
    lockstep = lockstep_of(PowerSGD(), gradients)
    for _ in range(4):
        outcome = lockstep.step(gradients)
        total = 3 * gradients[0][0]
        assert_close(outcome.reduced[0][0], total, terms=300 + 200)
        for (residual,) in outcome.residuals:
            assert np.abs(residual).max() < rounding(np.abs(total).max(), terms=300 + 200)


def test_equal_elements_are_sent_at_once():
    gradients = [[np.full((25, 41), -0.25, np.float32)]] * 2
    outcome = lockstep_of(PowerSGD(), gradients).step(gradients)
    assert_close(outcome.reduced[0][0], np.full((25, 41), -0.5), terms=25 + 41)
    assert np.abs(outcome.residuals[0][0]).max() < rounding(0.5, terms=25 + 41)


def test_columns_that_are_not_needed_become_zero_and_are_there_when_needed():
    lockstep = lockstep_of(PowerSGD(), [[low_rank(120, 80, 1)]])
    for _ in range(2):
        outcome = lockstep.step([[low_rank(120, 80, 1)]])
        (factor,) = outcome.state[0][FACTOR]
        assert [bool(column.any()) for column in factor.T] == [True, False, False, False]
    gradient = low_rank(120, 80, 4, seed=9)
    outcome = lockstep.step([[gradient]])
    assert outcome.state[0][FACTOR][0].any(axis=0).all()
    assert_close(outcome.reduced[0][0], gradient, terms=120 + 80)


def test_steps_without_a_gradient_do_not_end_the_exchange():
    lockstep = lockstep_of(PowerSGD(), [[np.zeros((50, 40), np.float32)]] * 2)
    for _ in range(3):
        outcome = lockstep.step([[np.zeros((50, 40), np.float32)]] * 2)
        assert not outcome.reduced[0][0].any()
        assert not outcome.state[0][FACTOR][0].any()
    gradients = [[low_rank(50, 40, 2, seed)] for seed in range(2)]
    total = sum(gradient for (gradient,) in gradients)
    assert_close(lockstep.step(gradients).reduced[0][0], total, terms=50 + 40)


@both
def test_with_the_same_gradient_it_comes_close_to_the_best_of_its_rank(compressor, name):
    gradient = normal(100, 80) * 0.8 ** np.arange(80, dtype=np.float32)
    singular = np.linalg.svd(gradient, compute_uv=False)
    best = np.sqrt(np.sum(singular[4:] ** 2))
    errors = []
    lockstep = lockstep_of(compressor, [[gradient]])
    for _ in range(40):
        (residual,) = lockstep.state[0][RESIDUAL]
        (reduced,) = lockstep.step([[gradient - residual]]).reduced[0]
        errors.append(np.linalg.norm(gradient - reduced))
    assert errors[0] > 1.1 * best
    assert errors[-1] == pytest.approx(best, rel=0.01)


@both
def test_shared_state_is_equal_on_all_replicas(compressor, name):
    gradients = [[normal(70, 60, seed=seed), normal(3, 3, 9, 20, seed=9)] for seed in range(3)]
    outcome = lockstep_of(compressor, gradients).step(gradients)
    for other in outcome.state[1:]:
        for factor, expected in zip(other[name], outcome.state[0][name], strict=True):
            assert_equal_bits(factor, expected)


@pytest.mark.parametrize(
    ("values", "is_given"),
    [
        ([1e38] * 40, lambda right: not right.any()),  # the sum of left factors overflows
        (
            [1.5e37] * 3,
            lambda right: np.isfinite(right).all() and right.any(),
        ),  # that of right ones
        ([3e37, -2e37], lambda right: np.isnan(right[0])),  # the first replica's own product
    ],
    ids=["left", "right", "own"],
)
def test_sums_that_overflow_skip_the_step_and_are_dropped(values, is_given):
    warm_up = [[normal(64, 64, seed=i)] for i in range(len(values))]
    lockstep = lockstep_of(PowerSGD(), warm_up)
    before = lockstep.step(warm_up).state
    gradients = [[np.full((64, 64), value, np.float32)] for value in values]
    outcome = lockstep.step(gradients)
    assert is_given(outcome.payloads[0])
    assert outcome.finite == [False] * len(values)
    assert not outcome.reduced[0][0].any()
    for old, new in zip(before, outcome.state, strict=True):
        assert not new[RESIDUAL][0].any()
        assert_equal_bits(new[FACTOR][0], old[FACTOR][0])
    assert lockstep.step(warm_up).finite == [True] * len(values)


@both
def test_a_skipped_step_changes_no_factor(compressor, name):
    gradients = [[normal(60, 50, seed=seed)] for seed in range(2)]
    lockstep = lockstep_of(compressor, gradients)
    before = lockstep.step(gradients).state
    bad = [[gradients[0][0].copy()], gradients[1]]
    bad[0][0][59, 49] = np.inf
    outcome = lockstep.step(bad)
    assert outcome.finite == [False, False]
    assert_equal_bits(outcome.state[0][RESIDUAL][0], before[0][RESIDUAL][0])
    assert_equal_bits(outcome.state[1][RESIDUAL][0], before[1][RESIDUAL][0] + gradients[1][0])
    for replica in range(2):
        assert_equal_bits(outcome.state[replica][name][0], before[replica][name][0])


def halves(outcome, rows):
    """Returns whether P, and whether Q, of the first tensor is known after a step."""
    (factor, *_) = outcome.state[0][ALTERNATING_FACTOR]
    return bool(factor[:rows].any()), bool(factor[rows:].any())


def test_alternating_sends_one_of_the_factors_in_one_request():
    gradients = [[normal(90, 60), normal(3, 3, 16, 32), normal(40)]] * 2
    alternating = PowerSGD(alternate=True)
    plain = lockstep_of(PowerSGD(), gradients).step(gradients).tensor_bytes[0]
    lockstep = lockstep_of(alternating, gradients)
    outcomes = [lockstep.step(gradients) for _ in range(4)]
    assert [halves(outcome, 90) for outcome in outcomes] == [(True, False), (False, True)] * 2
    lengths = [4 * (outcome.payloads[0].size - 1) for outcome in outcomes]
    assert [int(outcome.tensor_bytes[0].sum()) for outcome in outcomes] == lengths
    assert [outcome.payload_bytes[0] - 4 for outcome in outcomes] == lengths
    assert list(outcomes[0].tensor_bytes[0]) == [16 * 90, 16 * 9 * 16, 4 * 40]
    assert list(outcomes[1].tensor_bytes[0]) == [16 * 60, 16 * 32, 4 * 40]
    assert lengths[0] + lengths[1] == plain.sum() + 4 * 40
    assert alternating.payload_bytes(specs_of(gradients[0])) == (lengths[0] + lengths[1]) // 2


def test_alternating_does_not_take_turns_by_the_number_of_the_step():
    """The others may be steps of other variables."""
    gradients = [[normal(50, 40)]]
    lockstep = lockstep_of(PowerSGD(alternate=True), gradients)
    seen = []
    for _ in range(4):
        seen.append(halves(lockstep.step(gradients), 50))
        lockstep.skip_a_step()
    assert seen == [(True, False), (False, True)] * 2


@pytest.mark.parametrize("true_rank", [1, 3, 4])
def test_alternating_sends_a_gradient_of_no_higher_rank_within_two_steps(true_rank):
    gradients = [[low_rank(300, 200, true_rank, seed)] for seed in (5, 5)]
    lockstep = lockstep_of(PowerSGD(alternate=True), gradients)
    sent = lockstep.step(gradients).reduced[0][0]
    outcome = lockstep.step(gradients)
    total = 4 * gradients[0][0]
    scale = np.abs(total).max() * 200  # of the sums of products
    assert_close(sent + outcome.reduced[0][0], total, terms=300 + 200, scale=scale)
    assert np.abs(outcome.residuals[0][0]).max() < rounding(scale, terms=300 + 200)


@pytest.mark.parametrize("steps_before", [1, 2], ids=["Q is sent", "P is sent"])
@pytest.mark.parametrize("values", [[2e38, 2e38], [2e38, -2e38]], ids=["the sum", "the own"])
def test_gradients_that_overflow_in_alternating_steps_are_dropped(values, steps_before):
    """Products with P or Q, or their sum, are too large."""
    warm_up = [[normal(64, 64, seed=i), normal(9)] for i in range(2)]
    lockstep = lockstep_of(PowerSGD(alternate=True), warm_up)
    for _ in range(steps_before):
        before = lockstep.step(warm_up).state
    gradients = [[np.full((64, 64), value, np.float32), normal(9)] for value in values]
    outcome = lockstep.step(gradients)
    assert outcome.finite == [False, False]
    for old, new in zip(before, outcome.state, strict=True):
        assert not new[RESIDUAL][0].any()
        assert_equal_bits(new[RESIDUAL][1], normal(9))
        assert_equal_bits(new[ALTERNATING_FACTOR][0], old[ALTERNATING_FACTOR][0])
    assert lockstep.step(warm_up).finite == [True, True]


def test_alternating_restarts_after_a_step_without_a_gradient():
    zeros = [[np.zeros((50, 40), np.float32)]] * 2
    gradients = [[normal(50, 40, seed=seed)] for seed in range(2)]
    lockstep = lockstep_of(PowerSGD(alternate=True), gradients)
    assert not lockstep.step(zeros).state[0][ALTERNATING_FACTOR][0].any()
    for known in [(True, False), (False, True)]:
        outcome = lockstep.step(gradients)
        assert halves(outcome, 50) == known
        assert outcome.state[0][ALTERNATING_FACTOR][0].any(axis=0).all()


def test_millions_of_elements_in_a_matrix():
    method = next(method for method in METHODS if method.label == "PowerSGD")
    gradients = [[1e-3 * normal(1024, 2443)]] * 2
    lockstep = lockstep_of(method.compressor, gradients)
    for _ in range(2):
        before = lockstep.state
        outcome = lockstep.step(gradients)
        conserved(method, before, gradients, outcome)
    assert_equal_bits(outcome.reduced[0][0], outcome.reduced[1][0])
