"""Tests plans of whole models: their contents, excluded variables, and the paper's ratios."""

import numpy as np
import pytest

from tests.compressors.lockstep import Lockstep
from tests.planning.models import resnet18, resnet50, specs
from tf_gradcomp.compressors import (
    QSGD,
    AdaComp,
    ArcTopK,
    PowerSGD,
    ScaleCom,
    TopK,
    power_sgd,
)
from tf_gradcomp.compressors.plans import plan_layers
from tf_gradcomp.policy import DENSE, VECTOR, GradientSpec

SHAPES = [(3, 3, 16, 32), (32,), (288, 64), (64, 100), (64, 1000), (20, 20), (2000,)]
PLANNED = [0, 2, 3, 4]
METHODS = [
    TopK(),
    PowerSGD(),
    QSGD(),
    AdaComp(),
    ScaleCom(50),
    ArcTopK(0.1, block=16),
]


def gradients_of(shapes, decay=0.7):
    """Each variable's is smaller than the one before."""
    rng = np.random.default_rng(5)
    return [
        (decay**i * rng.standard_normal(shape) ** 3).astype(np.float32)
        for i, shape in enumerate(shapes)
    ]


def spec_of(shape, kind=DENSE):
    return GradientSpec("layer/kernel", shape, "float32", kind)


@pytest.mark.parametrize("compressor", METHODS, ids=str)
def test_a_plan_sends_less_within_the_budget(compressor):
    plan = plan_layers(compressor, specs(SHAPES), gradients_of(SHAPES))
    defaults = compressor.settings(specs(SHAPES))
    assert plan.planned == len(PLANNED)
    assert plan.bytes < plan.uniform_bytes
    assert 0 < plan.budget_used <= 1
    assert not plan.reason
    for i, (spec, setting) in enumerate(zip(specs(SHAPES), plan.settings, strict=True)):
        assert setting in (
            {*compressor.choices(spec), defaults[i]} if i in PLANNED else {defaults[i]}
        )


def test_layers_at_the_smallest_choice_are_counted():
    first, *others = gradients_of(SHAPES)
    gradients = [first, *map(np.zeros_like, others)]  # only the first has an error
    choices = [[4, 8], None, [2, 4], [3, 4], [4, 8], None, None]
    plan = plan_layers(QSGD(), specs(SHAPES), gradients, choices)
    assert plan.settings == [4, 0, 2, 3, 4, 4, 0]
    assert plan.at_bound == plan.planned == 4
    choices[0] = [2, 4, 8]
    plan = plan_layers(QSGD(), specs(SHAPES), gradients, choices)
    assert (plan.settings[0], plan.at_bound) == (4, 3)


def test_another_reference_gives_another_budget():
    shapes = [(64, 100), (100, 64)]
    rough = plan_layers(QSGD(), specs(shapes), gradients_of(shapes), defaults=[2, 2])
    assert rough.settings == [2, 2]
    fine = plan_layers(QSGD(), specs(shapes), gradients_of(shapes), defaults=[8, 8])
    assert min(fine.settings) > 2


@pytest.mark.parametrize(
    ("scale", "choices", "reason"),
    [
        (0.0, None, "the budget of errors is 0"),
        (np.nan, None, "the budget of errors is not finite"),
        (1.0, [None] * len(SHAPES), "no variable has a choice"),
    ],
)
def test_without_a_plan_the_uniform_settings_stay_and_the_reason_is_given(scale, choices, reason):
    gradients = [scale * gradient for gradient in gradients_of(SHAPES)]
    for compressor in METHODS:
        plan = plan_layers(compressor, specs(SHAPES), gradients, choices)
        assert plan.settings == compressor.settings(specs(SHAPES))
        assert plan.bytes == plan.uniform_bytes
        assert np.isnan(plan.budget_used)
        assert plan.reason == reason


def test_one_gradient_that_is_not_finite_keeps_all_uniform():
    gradients = gradients_of(SHAPES)
    gradients[2][3, 3] = np.inf
    plan = plan_layers(TopK(), specs(SHAPES), gradients)
    assert plan.reason == "the budget of errors is not finite"


@pytest.mark.parametrize("value_bits", [32, 8, 1])
def test_small_vectors_are_counted_as_scalecom_sends_them(value_bits):
    compressor = ScaleCom(25, value_bits=value_bits)
    model = [spec_of((64, 48)), *(spec_of((16,), VECTOR) for _ in range(60))]
    gradients = [np.random.default_rng(0).laplace(size=s.shape).astype("float32") for s in model]
    plan = plan_layers(compressor, model, gradients, replicas=2)
    lockstep = Lockstep(compressor, model, 2)
    sent = sum(lockstep.step([gradients] * 2).tensor_bytes[0].sum() for _ in range(2)) / 2
    assert plan.uniform_bytes == pytest.approx(sent, abs=1)


# ---- choices


@pytest.mark.parametrize(
    ("compressor", "shape", "expected"),
    [
        (QSGD(4), (64, 64), [2, 3, 4, 5, 6, 7, 8]),
        (QSGD(2), (64, 64), [2, 3, 4]),
        (QSGD(8), (64, 64), [4, 5, 6, 7, 8]),
        (PowerSGD(4), (512, 512), [2, 3, 4, 5, 6, 7, 8]),
        (PowerSGD(1), (512, 512), [1, 2]),
        (PowerSGD(6), (64, 32), [3, 4, 5, 6, 7, 8, 9, 10, 0]),  # from 11 on whole is less
        (AdaComp(50), (64, 64), [5, 8, 13, 20, 32, 50, 79, 126, 199, 315, 500]),
        (AdaComp(9000), (64, 64), [900, 1426, 2261, 3583, 5679, 9000, 14264, 16383]),
        (ScaleCom(4), (64, 64), [1, 2, 3, 4, 6, 10, 16, 25, 40]),
    ],
    ids=str,
)
def test_choices_are_the_papers_range_around_the_methods_own(compressor, shape, expected):
    assert compressor.choices(spec_of(shape)) == expected


def test_densities_go_from_a_tenth_to_ten_times_in_steps_of_a_tenth():
    for density, choices in ((0.01, 100), (0.1, 50)):  # from half of the entries on whole is less
        entries = TopK(density).choices(spec_of((100, 100)))
        step = 1000 * density
        expected = [step * i for i in range(1, 101)]
        assert len(entries) == choices
        np.testing.assert_allclose(entries[:49], expected[:49], atol=1)
        assert TopK(density).settings([spec_of((100, 100))])[0] in entries
    assert entries[-1] == 0


@pytest.mark.parametrize(
    ("compressor", "values", "expected"),
    [
        (QSGD(), [8, 2, 8, None], [8, 2, 0]),
        (PowerSGD(), [2, 16, 17, 90, None], [2, 0]),
        (TopK(), [0.5, 0.01, 0.0101], [0, 40, 41]),
        (AdaComp(), [7, None], [7, 0]),
        (ScaleCom(), ["rule", 9, None], [400, 9, 1]),
    ],
    ids=str,
)
def test_values_as_the_constructor_takes_them_become_choices(compressor, values, expected):
    assert compressor.choices(spec_of((64, 64)), values) == expected


@pytest.mark.parametrize(
    ("compressor", "bad"),
    [
        (QSGD(), 9),
        (PowerSGD(), 0),
        (TopK(), 1.5),
        (AdaComp(), 16384),
        (ScaleCom(), "other"),
    ],
    ids=str,
)
def test_a_bad_value_among_the_choices_is_refused(compressor, bad):
    with pytest.raises(ValueError, match=rf"among the choices must be .*; received {bad!r}"):
        compressor.choices(spec_of((64, 64)), [bad])


@pytest.mark.parametrize(
    "compressor",
    [QSGD(None), PowerSGD(None), TopK(None), AdaComp(None), ScaleCom(None)],
    ids=str,
)
def test_small_variables_vectors_and_whole_variables_have_no_choices(compressor):
    assert compressor.choices(spec_of((64, 64))) is None
    planned = type(compressor)()
    assert planned.choices(spec_of((64, 64))) is not None
    assert planned.choices(spec_of((31, 33))) is None
    assert planned.choices(spec_of((5000,), VECTOR)) is None


# ---- the paper's Table 2, by the bytes of our payloads


def uniform_ratio(compressor, model):
    """Returns the ratio of a model's gradients to their payload."""
    gradients = [np.zeros(spec.shape, np.float32) for spec in model]
    plan = plan_layers(compressor, model, gradients, choices=[None] * len(model))
    return 4 * sum(spec.elements for spec in model) / plan.uniform_bytes


MODELS = {"ResNet-18": resnet18(), "ResNet-50": resnet50(), "Keras": resnet50(biases=True)}


def test_the_models_equal_the_papers():
    sizes = [sum(spec.elements for spec in model) for model in MODELS.values()]
    assert sizes == [11_220_132, 25_557_032, 25_583_592]


@pytest.mark.parametrize(
    ("compressor", "expected"),
    [
        (PowerSGD(4), [72.22, 66.54, 62.30]),
        (PowerSGD(2), [136.0, 116.6, 104.1]),
        (QSGD(4), [7.83, 7.76, 7.71]),
        (QSGD(2), [15.32, 15.05, 14.84]),
        (TopK({**TopK().density.by_kind, VECTOR: None}), [47.97, 45.30, 43.31]),
        (TopK({**dict.fromkeys(TopK().density.by_kind, 0.001), VECTOR: None}), [350, 243, 194.3]),
    ],
    ids=["rank 4", "rank 2", "4 bits", "2 bits", "1 %", "0.1 %"],
)
def test_uniform_ratios_equal_the_papers_table_2(compressor, expected, monkeypatch):
    # Errors do not matter here.
    monkeypatch.setattr(power_sgd, "_captured", lambda matrix, rank: np.zeros(rank))
    ratios = [uniform_ratio(compressor, model) for model in MODELS.values()]
    np.testing.assert_allclose(ratios, expected, rtol=2e-3)
