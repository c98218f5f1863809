"""Loss functions of the user's under several replicas."""

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.replicas import collective
from tf_gradcomp.distribute import notices


def trained(loss, strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(gc.CompressedOptimizer(keras.optimizers.SGD(0.1), "no_compression"), loss)
    before = model.get_weights()[0]
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    model.fit(x, x[:, :2], batch_size=8, verbose=0)
    return model.get_weights()[0] - before


@pytest.mark.parametrize(("axis", "times"), [(-1, 1), (None, 2)])
def test_of_a_loss_that_keras_does_not_divide_the_user_is_told(axis, times, caplog):
    notices.forget()

    def loss(y, predicted):
        return keras.ops.mean(keras.ops.square(y - predicted), axis)

    moved = trained(loss, collective()) / trained("mse", collective())
    np.testing.assert_allclose(moved, times, rtol=1e-4)
    assert ("returns one number for a whole batch" in caplog.text) == (times > 1)
