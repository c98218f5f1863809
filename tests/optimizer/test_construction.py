"""`CompressedOptimizer` is made of an object, a config or a name, and copied by its config."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close
from tests.optimizer.cases import FEATURES, OPTIMIZERS, Replicas, copy_of, gradients_at, label
from tests.replicas import copies, mirrored, per_replica, stepper

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("form", ["object", "config", "name"])
def test_the_inner_optimizer_is_an_object_a_config_or_a_name(form):
    adam = keras.optimizers.Adam(0.125)
    given = {"object": adam, "config": keras.optimizers.serialize(adam), "name": "adam"}[form]
    optimizer = gc.CompressedOptimizer(given)
    assert type(optimizer.inner_optimizer) is keras.optimizers.Adam
    if form != "name":
        assert float(optimizer.learning_rate) == 0.125
    if form == "object":
        assert optimizer.inner_optimizer is adam


@pytest.mark.parametrize("inner", [*OPTIMIZERS, *FEATURES], ids=label)
def test_config_round_trips(inner):
    compressor = gc.compressors.AdaComp(bin_sizes=60, scale_factor=3.0, overrides={"bias": None})
    policy = gc.Policy({"kernel": "convolution"}, max_dense_elements=100)
    optimizer = gc.CompressedOptimizer(
        copy_of(inner), compressor, policy, name="mine", reduction="mean"
    )
    again = [
        gc.CompressedOptimizer.from_config(optimizer.get_config()),
        keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
        keras.optimizers.get(keras.optimizers.serialize(optimizer)),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer)),
    ]
    for copy in again:
        assert type(copy) is gc.CompressedOptimizer
        assert copy is not optimizer
        assert copy.get_config() == optimizer.get_config()
        assert (copy.name, copy.reduction) == ("mine", "mean")
        assert type(copy.inner_optimizer) is type(inner)
        assert copy.compressor.get_config() == compressor.get_config()
        assert copy.exchange.policy.get_config() == policy.get_config()


def test_a_custom_inner_optimizer_comes_back_by_custom_objects():
    class Mine(keras.optimizers.SGD):
        pass

    config = gc.CompressedOptimizer(Mine(0.5)).get_config()
    copy = gc.CompressedOptimizer.from_config(config, custom_objects={"Mine": Mine})
    assert type(copy.inner_optimizer) is Mine


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_variables(dtype):
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(np.zeros((20, 30)), dtype=dtype, name="kernel")
        optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([variable])
    step = stepper(strategy, lambda grads: optimizer.apply(grads, [variable]))
    gradient = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    for _ in range(2):
        step([[tf.cast(gradient, dtype)]] * 2)
    residuals = copies(strategy, optimizer.exchange.residuals[0])
    assert residuals[0].dtype == np.float32
    total = sum(residuals) - tf.cast(variable.value, tf.float32).numpy()
    scale = 4 * np.abs(gradient).max()
    assert_close(total, 4 * gradient, terms=2 + 2, scale=scale, dtype=dtype)


def test_overlapping_names_are_distinguished():
    strategy = mirrored(2)
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros((i, 5), "float32"), name=name)
            for i, name in enumerate(["kernel", "kernel", "kernel_1", "kernel"], 1)
        ]
        optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build(variables)
    paths = [spec.path for spec in optimizer.exchange.specs]
    assert len(set(paths)) == 4
    step = stepper(strategy, lambda grads: optimizer.apply(grads, variables))
    step([[np.full((i, 5), i, "float32") for i in range(1, 5)]] * 2)
    for i, variable in enumerate(variables, 1):
        np.testing.assert_array_equal(variable.numpy(), np.full((i, 5), -2 * i))


def test_xla_is_refused_with_several_replicas():
    replicas = Replicas("sgd")
    gradients = [
        per_replica(replicas.strategy, list(g)) for g in zip(*gradients_at(0), strict=True)
    ]

    @tf.function(jit_compile=True, autograph=False)
    def compiled(*grads):
        replicas.optimizer.apply(list(grads), replicas.variables)

    with pytest.raises(ValueError, match="use jit_compile=False"):
        replicas.strategy.run(compiled, gradients)
