"""Error tables hold the bytes and the errors of the methods themselves."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import rounding
from tests.compressors.lockstep import Lockstep
from tf_gradcomp import ops
from tf_gradcomp.compressors import (
    QSGD,
    AdaComp,
    ArcTopK,
    MaxNormQuantization,
    PowerSGD,
    ScaleCom,
    TopK,
    power_sgd,
)
from tf_gradcomp.compressors.plans import table
from tf_gradcomp.policy import CONVOLUTION, DENSE, GradientSpec

SHAPE = (3, 3, 30, 77)  # no multiple of a bucket, a chunk or a vector register
SPEC = GradientSpec("layer/kernel", SHAPE, "float32", CONVOLUTION)


def gradient_of(shape=SHAPE, scale=1e-3):
    """A few entries are much larger than most."""
    values = np.random.default_rng(3).standard_normal(shape) ** 3
    return (scale * values).astype(np.float32)


def table_of(compressor, settings, *, spec=SPEC, gradient=None):
    gradient = gradient_of(spec.shape) if gradient is None else gradient
    return table(compressor, spec, gradient, settings, default=settings[0])


def simulated(compressor, step=0):
    """Encodes a gradient in a step; returns the bytes sent and the norm of the residual."""
    lockstep = Lockstep(compressor, [SPEC], 1)
    for _ in range(step):
        lockstep.skip_a_step()
    outcome = lockstep.step([[gradient_of()]])
    return outcome.tensor_bytes[0][0], np.linalg.norm(outcome.residuals[0][0].astype(np.float64))


@pytest.mark.parametrize(
    ("with_setting", "values", "setting_of"),
    [
        (
            TopK,
            [0.001, 0.01, 0.3, 0.45, None],
            lambda value: int((value or 0) * gradient_of().size),
        ),
        (AdaComp, [1, 5, 50, 500, 16383, None], lambda value: value or 0),
        (lambda size: AdaComp(size, scale_factor=3.0), [50], lambda value: value),
        (ScaleCom, [2, 25, 400, 65536, None], lambda value: value or 1),
    ],
    ids=["TopK", "AdaComp", "AdaComp, factor 3", "ScaleCom"],
)
def test_bytes_and_errors_equal_a_step_from_zero(with_setting, values, setting_of):
    expected = [simulated(with_setting(value)) for value in values]
    # A setting does not depend on those before it.
    for order in (slice(None), slice(None, None, -1)):
        settings = [setting_of(value) for value in values][order]
        planned = table_of(with_setting(values[0]), settings)
        assert planned.bytes.tolist() == [sent for sent, _ in expected][order]
        np.testing.assert_allclose(
            planned.errors, [left for _, left in expected][order], rtol=rounding(1, terms=8)
        )


@pytest.mark.parametrize("value_bits", [32, 16, 8, 1])
def test_bytes_are_the_mean_over_replicas_that_lead_in_turn(value_bits):
    rates = [2, 25, 400]
    counted = [
        Lockstep(ScaleCom(rate, value_bits=value_bits), [SPEC], 4)
        .step([[gradient_of()]] * 4)
        .tensor_bytes[0][0]
        for rate in rates
    ]
    compressor = ScaleCom(rates[0], value_bits=value_bits)
    planned = table(compressor, SPEC, gradient_of(), rates, default=rates[0], replicas=4)
    assert planned.bytes.tolist() == counted


@pytest.mark.parametrize(
    ("bits", "bucket_size", "message"),
    [
        ([4, 9], 1024, r"bits\[1\] is 9; expected 2 to 8, or 0"),
        ([1], 1024, r"bits\[0\] is 1"),
        ([[4]], 1024, "bits has shape"),
        ([4], 33, "bucket_size is 33; expected a multiple of 32"),
    ],
)
def test_bad_arguments_of_qsgds_errors_are_refused(bits, bucket_size, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.qsgd_errors(gradient_of(), bits, bucket_size=bucket_size)


@pytest.mark.parametrize(
    ("method", "off"),
    [
        (QSGD, 5e-3),
        (functools.partial(QSGD, bucket_size=96), 5e-3),
        (MaxNormQuantization, 5e-3),
        # The largest entry of the whole tensor counts, not the largest of the drawn entries.
        (functools.partial(MaxNormQuantization, density=0.25), 0.1),
    ],
    ids=["QSGD", "QSGD, buckets of 96", "MaxNormQuantization", "a quarter"],
)
def test_the_error_of_stochastic_rounding_is_the_expected_one(method, off):
    planned = table_of(method(), [2, 4, 8])
    for bits, size, error in zip(*planned[:3], strict=True):
        sent, left = zip(*[simulated(method(bits), step) for step in range(10)], strict=True)
        assert {size} == set(sent)
        np.testing.assert_allclose(error, np.sqrt(np.mean(np.square(left))), rtol=off)


@pytest.mark.parametrize("shape", [(40, 300), (300, 40), SHAPE, (64, 64)])
def test_powersgds_error_is_the_tail_of_the_singular_values(shape):
    ranks = [1, 2, 5, 0, 16]
    spec = GradientSpec("layer/kernel", shape, "float32", DENSE)
    planned = table_of(PowerSGD(), ranks, spec=spec)
    matrix = gradient_of(shape).reshape(-1, shape[-1]).astype(np.float64)
    tail = np.sqrt(np.cumsum(np.linalg.svd(matrix, compute_uv=False)[::-1] ** 2)[::-1])
    np.testing.assert_allclose(planned.errors, [tail[rank] if rank else 0 for rank in ranks], 1e-6)
    sizes = [4 * rank * sum(matrix.shape) if rank else 4 * matrix.size for rank in ranks]
    assert planned.bytes.tolist() == sizes
    alternating = table_of(PowerSGD(alternate=True), ranks, spec=spec)
    assert alternating.errors.tolist() == planned.errors.tolist()
    halved = [size / 2 if rank else size for size, rank in zip(sizes, ranks, strict=True)]
    assert alternating.bytes.tolist() == halved


def test_powersgds_error_of_a_huge_matrix_is_near_the_best(monkeypatch):
    spec = GradientSpec("layer/kernel", (300, 200), "float32", DENSE)
    best = table_of(PowerSGD(), [1, 4, 8], spec=spec)
    monkeypatch.setattr(power_sgd, "LARGEST_GRAM", 100)
    near = table_of(PowerSGD(), [1, 4, 8], spec=spec)
    assert (near.errors > best.errors).all()
    np.testing.assert_allclose(near.errors, best.errors, rtol=0.018)


def test_a_low_rank_gradient_misses_nothing_at_its_rank():
    spec = GradientSpec("layer/kernel", (90, 70), "float32", DENSE)
    gradient = np.outer(np.arange(90), np.arange(70)).astype(np.float32)
    errors = table_of(PowerSGD(), [1, 2, 3], spec=spec, gradient=gradient).errors
    assert (errors < 1e-6 * np.linalg.norm(gradient)).all()


METHODS = [
    *((TopK(), 30), (PowerSGD(), 2), (QSGD(), 4), (MaxNormQuantization(), 4)),
    *((AdaComp(), 50), (ScaleCom(), 25), (ArcTopK(), 2)),
]


@pytest.mark.parametrize(("compressor", "setting"), METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_has_no_errors(compressor, setting, bad):
    gradient = gradient_of()
    gradient[1, 2, 3, 4] = bad
    planned = table_of(compressor, [setting], gradient=gradient)
    assert np.isnan(planned.errors).all()
    assert (planned.bytes > 0).all()


@pytest.mark.parametrize(("compressor", "setting"), METHODS)
@pytest.mark.parametrize("shape", [(0, 6), (6, 0), (1,), ()])
def test_any_variable_has_a_table(compressor, setting, shape):
    spec = GradientSpec("layer/bias", shape, "float32", DENSE)
    [defaults] = compressor.settings([spec])
    assert (table_of(compressor, [defaults], spec=spec, gradient=np.zeros(shape)).errors == 0).all()


def test_the_uniform_setting_joins_the_choices():
    planned = table(TopK(), SPEC, gradient_of(), [10, 20, 10], default=15)
    assert planned.settings == [10, 20, 15]
    assert planned.default == 2
    assert table(TopK(), SPEC, gradient_of(), [10, 20], default=20).default == 1


def test_a_half_precision_gradient_counts_as_it_is():
    spec = GradientSpec("layer/kernel", SHAPE, "float16", DENSE)
    gradient = gradient_of(scale=1).astype(np.float16)
    for compressor, setting in METHODS:
        half = table_of(compressor, [setting], spec=spec, gradient=gradient)
        full = table_of(compressor, [setting], gradient=gradient.astype(np.float32))
        assert half.errors == full.errors


@pytest.mark.parametrize("exponent", [-66, 60, 120])  # squares leave float32's range
@pytest.mark.parametrize(
    ("compressor", "settings"),
    [
        (AdaComp(), [5, 50]),
        (ScaleCom(), [25, 400]),
        (TopK(), [100, 1000]),
        (QSGD(), [2, 4]),
        (PowerSGD(), [1, 4]),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_errors_scale_with_the_gradient(compressor, settings, exponent):
    gradient = gradient_of()
    planned = table_of(compressor, settings, gradient=gradient)
    scaled = table_of(compressor, settings, gradient=np.ldexp(gradient, exponent))
    assert (planned.errors > 0).all()
    assert scaled.errors.tolist() == np.ldexp(planned.errors, exponent).tolist()
    assert scaled.bytes.tolist() == planned.bytes.tolist()
