"""Loss functions of the user's under several replicas."""

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.bounds import rounding
from tests.replicas import collective
from tf_gradcomp.groups import messages


def trained(loss, strategy, reduction=None):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        optimizer = gc.CompressedOptimizer(
            keras.optimizers.SGD(0.1), "no_compression", reduction=reduction
        )
        model.compile(optimizer, loss)
    before = model.get_weights()[0]
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    model.fit(x, x[:, :2], batch_size=8, verbose=0)
    return model.get_weights()[0] - before


@pytest.mark.parametrize(
    ("axis", "reduction", "times", "logged"),
    [
        (-1, None, 1, None),
        (-1, "sum", 1, None),
        (None, "sum", 2, "returns one number for a whole batch"),
        (None, "mean", 1, None),
        (-1, "mean", 1 / 2, "divides its gradients a second time"),
    ],
)
def test_a_loss_that_is_divided_never_or_twice_is_reported(axis, reduction, times, logged, caplog):
    messages.forget()

    def loss(y, predicted):
        return keras.ops.mean(keras.ops.square(y - predicted), axis)

    moved, expected = trained(loss, collective(), reduction), trained("mse", collective())
    # A weight below 2 rounds before and after the step, whose gradient is a sum over 8 rows.
    bound = rounding(2, terms=2) + rounding(0.1 * 2, terms=8 + 3)
    np.testing.assert_allclose(moved, times * expected, rtol=0, atol=(1 + times) * bound)
    for text in ("returns one number for a whole batch", "divides its gradients a second time"):
        assert (text in caplog.text) == (text == logged)
