"""`CompressedOptimizer` with one replica is the inner optimizer."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.optimizer.cases import (
    FEATURES,
    OPTIMIZERS,
    copy_of,
    gradients_at,
    iterations,
    label,
    new_variables,
)
from tests.replicas import mirrored

pytestmark = pytest.mark.quick


class Shrinking(keras.constraints.Constraint):
    """Does something each time."""

    def __call__(self, w):
        return 0.9 * w


def assert_equal_training(inner, *strategies, steps=5, jit_compile=False, **compile_args):
    """Trains a small model with and without compression, and compares every bit.

    Except with XLA, which rounds in another way when the code around changes.
    """
    tolerance = 1e-5 if jit_compile else 0

    def train(strategy, make_optimizer):
        with strategy.scope():
            return train_in_scope(make_optimizer())

    def train_in_scope(optimizer):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(20, 8),
                keras.layers.Flatten(),
                keras.layers.Dense(10, activation="relu"),
                keras.layers.Dense(3, kernel_constraint=Shrinking()),
            ]
        )
        model.compile(optimizer, loss="mse", jit_compile=jit_compile, **compile_args)
        generator = np.random.default_rng(0)
        x = generator.integers(0, 20, (steps * 8, 6))
        y = generator.normal(size=(steps * 8, 3))
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        return model

    default = tf.distribute.get_strategy()
    plain = train(default, lambda: copy_of(inner))
    for strategy in (default, *strategies):
        compressed = train(strategy, lambda: gc.CompressedOptimizer(copy_of(inner)))
        assert_equal(plain, compressed, tolerance)


def assert_equal(plain, compressed, tolerance):
    for expected, actual in zip(plain.variables, compressed.variables, strict=True):
        np.testing.assert_allclose(
            expected.numpy(), actual.numpy(), tolerance, tolerance, err_msg=expected.path
        )
    state = compressed.optimizer.inner_optimizer.variables
    for expected, actual in zip(plain.optimizer.variables, state, strict=True):
        np.testing.assert_allclose(
            expected.numpy(), actual.numpy(), tolerance, tolerance, err_msg=expected.path
        )
    assert iterations(plain.optimizer) == iterations(compressed.optimizer)


@pytest.mark.parametrize("inner", OPTIMIZERS, ids=label)
def test_one_replica_is_the_inner_optimizer_bit_by_bit(inner):
    assert_equal_training(inner, run_eagerly=True)  # quickly; the test below traces its steps


@pytest.mark.parametrize("inner", FEATURES, ids=label)
def test_one_replica_also_of_a_strategy_is_the_inner_optimizer_bit_by_bit(inner):
    """With accumulation and overwriting averages, too, where Keras itself fails."""
    strategies = [mirrored(1)]
    if inner.use_ema or inner.gradient_accumulation_steps:
        strategies.append(gc.MultiWorkerMirroredStrategy())
    assert_equal_training(inner, *strategies, steps=4)  # without accumulated gradients


def test_one_replica_may_be_compiled_by_xla():
    assert_equal_training(keras.optimizers.Adam(0.01), jit_compile=True)


def test_one_replica_sends_nothing():
    optimizer, variables = gc.CompressedOptimizer("sgd"), new_variables()
    optimizer.build(variables)
    optimizer.apply([tf.ones(v.shape) for v in variables], variables)
    assert optimizer.exchange.traffic().exchanges == 0


def test_one_replica_of_a_method_without_residuals_is_the_inner_optimizer():
    optimizer, variables = gc.CompressedOptimizer("sgd", "cast"), new_variables()
    plain, expected = keras.optimizers.get("sgd"), new_variables()
    gradients = [tf.constant(gradient) for gradient in gradients_at(0)[0]]
    optimizer.apply(gradients, variables)
    plain.apply(gradients, expected)
    for variable, other in zip(variables, expected, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy())
