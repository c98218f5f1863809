"""Steps that all replicas skip; loss scaling and accumulation."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.optimizer.cases import Replicas, gradients_at, iterations
from tests.replicas import collective, copies, mirrored


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("make", [mirrored, collective], ids=["copied", "collective"])
def test_a_step_with_a_bad_gradient_is_skipped_by_all(bad, graph, make):
    replicas = Replicas("adam", make(), graph=graph, precondition=None)
    replicas.step(gradients_at(0))
    before = replicas.value()
    residuals = replicas.residuals()
    gradients = gradients_at(1, bad=bad)
    replicas.step(gradients)
    np.testing.assert_array_equal(replicas.value(), before)
    assert iterations(replicas.optimizer) == 1
    assert replicas.optimizer.exchange.skipped_steps.numpy() == 1
    after = replicas.residuals()
    np.testing.assert_allclose(after[bad], residuals[bad], atol=1e-5)
    good = 1 - bad
    np.testing.assert_allclose(after[good], residuals[good] + gradients[good][0], atol=1e-5)
    replicas.step(gradients_at(2))
    assert iterations(replicas.optimizer) == 2
    assert np.isfinite(replicas.value()).all()
    replicas.assert_replicas_equal()


def scaled(gradients, scale):
    return [[gradient * np.float32(scale) for gradient in of_one] for of_one in gradients]


def outer_scaler(**kwargs):
    return lambda optimizer: keras.optimizers.LossScaleOptimizer(optimizer, **kwargs)


@pytest.mark.parametrize("where", ["inside", "around"])
def test_loss_scaling(where):
    if where == "inside":
        inner = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=64.0, dynamic_growth_steps=2
        )
        replicas = Replicas(inner)
        scaler = replicas.optimizer.inner_optimizer
    else:
        around = outer_scaler(initial_scale=64.0, dynamic_growth_steps=2)
        replicas = Replicas(keras.optimizers.SGD(1.0), around=around)
        scaler = replicas.outer
    plain = Replicas(keras.optimizers.SGD(1.0))
    assert float(replicas.outer.scale_loss(1.0)) == 64.0

    replicas.step(scaled(gradients_at(0), 64))
    plain.step(gradients_at(0))
    np.testing.assert_array_equal(replicas.value(), plain.value())
    np.testing.assert_array_equal(replicas.residuals()[0], plain.residuals()[0])
    assert scaler.dynamic_scale.numpy() == 64

    replicas.step(gradients_at(1, bad=1))
    np.testing.assert_array_equal(replicas.value(), plain.value())
    assert copies(replicas.strategy, scaler.dynamic_scale) == [32, 32]
    assert iterations(replicas.outer) == 1

    for step in (2, 3):
        replicas.step(scaled(gradients_at(step), 32))
    assert copies(replicas.strategy, scaler.dynamic_scale) == [64, 64]
    replicas.assert_replicas_equal()


@pytest.mark.parametrize("around", [None, outer_scaler(initial_scale=4.0)], ids=["", "scaled"])
def test_gradient_accumulation_exchanges_on_the_steps_that_update(around):
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    replicas = Replicas(inner, around=around)
    plain = Replicas(keras.optimizers.SGD(1.0))
    factor = 4 if around else 1
    for round_ in range(2):
        micro = [gradients_at(3 * round_ + i) for i in range(3)]
        for i, gradients in enumerate(micro):
            before = replicas.value()
            replicas.step(scaled(gradients, factor))
            assert (replicas.value() == before).all() == (i < 2)
        means = [
            [np.float32(sum(m[r][v] for m in micro)) / np.float32(3) for v in range(2)]
            for r in range(2)
        ]
        plain.step(means)
        np.testing.assert_allclose(replicas.value(), plain.value(), atol=1e-5)
    assert replicas.optimizer.exchange.traffic().exchanges == 2
    assert iterations(replicas.optimizer) == 2
    replicas.assert_replicas_equal()


def test_a_bad_gradient_while_accumulating_skips_the_update_and_no_more():
    replicas = Replicas(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
    start = replicas.value()
    replicas.step(gradients_at(0, bad=0))
    replicas.step(gradients_at(1))
    np.testing.assert_array_equal(replicas.value(), start)
    assert replicas.optimizer.exchange.skipped_steps.numpy() == 1
    replicas.step(gradients_at(2))
    replicas.step(gradients_at(3))
    assert (replicas.value() != start).any()
    assert np.isfinite(replicas.value()).all()
