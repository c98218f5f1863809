"""Settings of the inner optimizer of a `CompressedOptimizer` count."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.bounds import assert_close
from tests.optimizer.cases import Replicas, gradients_at
from tests.replicas import copies, mirrored, stepper


def test_learning_rate_is_the_inner_optimizers():
    inner = keras.optimizers.SGD(0.5)
    optimizer = gc.CompressedOptimizer(inner)
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert float(inner.learning_rate) == 0.25
    optimizer.learning_rate.assign(0.125)
    assert float(inner.learning_rate) == 0.125


def test_a_set_learning_rate_is_applied_by_all_replicas():
    replicas = Replicas(keras.optimizers.SGD(1.0))
    replicas.optimizer.learning_rate = 0.0
    start = replicas.value()
    replicas.step(gradients_at(0))
    np.testing.assert_array_equal(replicas.value(), start)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clipnorm", 1.0),
        ("weight_decay", 0.1),
        ("use_ema", True),
        ("ema_overwrite_frequency", 2),
        ("momentum", 0.5),
    ],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_settings_on_the_wrapper_in_place_of_the_inner_optimizer_are_refused(name, value, scaled):
    inner = keras.optimizers.SGD(1.0, momentum=0.9)
    replicas = Replicas(keras.optimizers.LossScaleOptimizer(inner) if scaled else inner)
    setattr(replicas.optimizer, name, value)
    with pytest.raises(ValueError, match=f"{name} was set on the wrapper"):
        replicas.step(gradients_at(0))


def test_settings_in_place_of_an_inner_loss_scaler_are_refused():
    replicas = Replicas(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)))
    replicas.optimizer.dynamic_growth_steps = 5
    with pytest.raises(ValueError, match="dynamic_growth_steps was set on the wrapper"):
        replicas.step(gradients_at(0))


def test_a_custom_class_may_have_its_own_settings():
    class Own(gc.CompressedOptimizer):
        def __init__(self, inner):
            super().__init__(inner)
            self.momentum = 0.5

    variable = keras.Variable(np.zeros(3, "float32"), name="kernel")
    Own(keras.optimizers.SGD(1.0, momentum=0.9)).apply([np.ones(3, "float32")], [variable])
    np.testing.assert_array_equal(variable, -np.ones(3))


def test_custom_attributes_and_methods_may_be_set_on_the_wrapper():
    replicas, calls = Replicas("sgd"), []
    apply = replicas.optimizer.apply
    replicas.optimizer.remark = "the third run"
    replicas.optimizer.apply = lambda *args: calls.append(1) or apply(*args)
    replicas.step(gradients_at(0))
    assert calls


def test_schedules_follow_the_steps():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [1.0, 0.5, 0.25])
    replicas = Replicas(keras.optimizers.SGD(schedule))
    rates = []
    for step in range(4):
        rates.append(float(replicas.optimizer.learning_rate))
        replicas.step(gradients_at(step))
    assert rates == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("scaled", [False, True])
def test_weight_decay_excludes_variables(scaled):
    strategy = mirrored(2)
    with strategy.scope():
        inner = keras.optimizers.SGD(1.0, weight_decay=0.5)
        if scaled:
            inner = keras.optimizers.LossScaleOptimizer(inner)
        variables = [keras.Variable(np.ones(3, "float32"), name=n) for n in ("kernel", "bias")]
        optimizer = gc.CompressedOptimizer(inner)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        optimizer.build(variables)
    step = stepper(strategy, lambda grads: optimizer.apply(grads, variables))
    step([[np.zeros(3, "float32")] * 2] * 2)
    np.testing.assert_array_equal(variables[0].numpy(), np.full(3, 0.5))
    np.testing.assert_array_equal(variables[1].numpy(), np.ones(3))


def test_finalizing_overwrites_weights_by_their_averages():
    replicas = Replicas(keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5))
    weights = []
    for step in range(2):
        replicas.step(gradients_at(step))
        weights.append(replicas.value())
    replicas.optimizer.finalize_variable_values(replicas.variables)
    for copy in copies(replicas.strategy, replicas.variables[0]):
        assert_close(copy, (weights[0] + weights[1]) / 2, terms=4, steps=2)


def test_weights_are_overwritten_by_their_averages_at_the_set_frequency():
    averaging = {"use_ema": True, "ema_momentum": 0.5}
    inner = keras.optimizers.SGD(1.0, **averaging, ema_overwrite_frequency=2)
    replicas = Replicas(inner)
    plain = Replicas(keras.optimizers.SGD(1.0, **averaging))
    for step in range(2):
        replicas.step(gradients_at(step))
        plain.step(gradients_at(step))
        assert (replicas.value() == plain.value()).all() == (step == 0)
    plain.optimizer.finalize_variable_values(plain.variables)
    np.testing.assert_array_equal(replicas.value(), plain.value())
    replicas.assert_replicas_equal()


def test_variables_are_the_inner_optimizers_and_the_exchange_has_its_own():
    optimizer = Replicas("adam").optimizer
    inner = optimizer.inner_optimizer.variables
    assert [id(v) for v in optimizer.variables] == [id(v) for v in inner]
    names = [variable.name.split(":")[0] for variable in optimizer.exchange.variables]
    job_names = [
        "exchange_step",
        "residual_scale",
        "has_residual",
        "moments_since",
        "moments_taken",
    ]
    state = [
        f"{name}_{kind}" for kind in ("residual", "second_moment") for name in ("kernel", "bias")
    ]
    assert sorted(names) == sorted(["skipped_steps", *job_names, *state])
