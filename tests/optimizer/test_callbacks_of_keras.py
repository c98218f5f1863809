"""Tests that Keras' callbacks find the attributes of a wrapped optimizer."""

import keras
import numpy as np
import pytest

import tf_gradcomp as gc

ROWS = 24


def averaging():
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)


def compressed(inner):
    return gc.CompressedOptimizer(inner, "no_compression")


def scaled(inner):
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0)


def several(kernels, biases):
    by_name = keras.optimizers.OptimizerMap(kernels, {".*bias": biases})
    return keras.optimizers.MultiOptimizer(by_name)


# The wrapped optimizer, and the same optimizer without a wrapper.
CASES = {
    "alone": (lambda: compressed(averaging()), averaging),
    "in a loss scaler": (lambda: scaled(compressed(averaging())), lambda: scaled(averaging())),
    "around a loss scaler": (lambda: compressed(scaled(averaging())), averaging),
    "all of several": (
        lambda: several(compressed(averaging()), compressed(averaging())),
        lambda: several(averaging(), averaging()),
    ),
    "one of several": (
        lambda: several(compressed(averaging()), averaging()),
        lambda: several(averaging(), averaging()),
    ),
    "another one averages": (
        lambda: several(compressed(averaging()), keras.optimizers.SGD(0.1)),
        lambda: several(averaging(), keras.optimizers.SGD(0.1)),
    ),
}


def trained(optimizer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    history = model.fit(
        x,
        x.sum(1),
        batch_size=8,
        epochs=2,
        shuffle=False,
        validation_data=(x, x.sum(1)),
        callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
        verbose=0,
    ).history
    return history, model.get_weights()


@pytest.mark.parametrize("case", CASES)
def test_averages_are_swapped_in_for_validation_wherever_the_wrapper_is(case):
    wrapped, plain = (trained(make()) for make in CASES[case])
    assert wrapped[0]["val_loss"] == plain[0]["val_loss"]
    for ours, expected in zip(wrapped[1], plain[1], strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_an_optimizer_without_averages_is_refused_as_by_keras():
    with pytest.raises((ValueError, AttributeError), match="use_ema"):
        trained(scaled(compressed(keras.optimizers.SGD(0.1))))
