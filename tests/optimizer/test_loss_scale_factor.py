"""A static `loss_scale_factor` on the inner optimizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import rounding
from tests.optimizer.cases import Replicas, gradients_at
from tests.replicas import mirrored
from tf_gradcomp.keras.keras3.steps import unscaled

FACTOR = 1024.0
INNER = {
    "adam": {"learning_rate": 0.01},
    "adam, clipped": {"learning_rate": 0.01, "clipnorm": 0.5},
    "adam, averaged": {"learning_rate": 0.01, "use_ema": True},
    "adam, accumulating": {"learning_rate": 0.01, "gradient_accumulation_steps": 2},
}


def scaled(gradients):
    return [
        [FACTOR * gradient for gradient in replica_gradients] for replica_gradients in gradients
    ]


@pytest.mark.parametrize(
    ("name", "compressor", "replicas"),
    [
        *((name, "adacomp", replicas) for name in INNER for replicas in (1, 2)),
        *((name, "no_compression", 2) for name in ("adam", "adam, accumulating")),
    ],
)
def test_is_undone_once_and_before_anything_else(name, compressor, replicas):
    pair = [
        Replicas(
            keras.optimizers.Adam(**INNER[name], loss_scale_factor=factor),
            mirrored(replicas),
            graph=False,  # tracing takes longer than four steps
            compressor=compressor,
        )
        for factor in (None, FACTOR)
    ]
    for step in range(4):
        gradients = gradients_at(step, replicas)
        pair[0].step(gradients)
        pair[1].step(scaled(gradients))
    for plain, other_variable in zip(pair[0].variables, pair[1].variables, strict=True):
        np.testing.assert_array_equal(other_variable.numpy(), plain.numpy())
    assert pair[1].optimizer.loss_scale_factor == FACTOR


@pytest.mark.parametrize("inner", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_the_residual_of_an_earlier_job_is_not_scaled(inner):
    variable = keras.Variable(np.zeros(5, "float32"), name="kernel")
    twin = keras.Variable(np.zeros(5, "float32"), name="kernel")
    for weights, factor in ((variable, None), (twin, FACTOR)):
        optimizer = gc.CompressedOptimizer(inner(0.1, loss_scale_factor=factor))
        optimizer.build([weights])
        optimizer.load_own_variables({"residual_0": np.arange(5.0), "has_residual": [True]})
        gradient = np.ones(5, "float32") * (factor or 1.0)
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [weights])
    np.testing.assert_array_equal(twin.numpy(), variable.numpy())


def test_a_dynamic_scale_around_takes_the_place_of_a_static_one():
    inner = keras.optimizers.SGD(0.1, loss_scale_factor=FACTOR)
    optimizer = gc.CompressedOptimizer(inner)
    keras.optimizers.LossScaleOptimizer(optimizer)
    assert optimizer.loss_scale_factor is None


@pytest.mark.parametrize("scale", [2.0**15, 2.0**16, 2.0**20])
def test_a_scale_beyond_float16_leaves_gradients_as_they_are(scale):
    gradient = tf.constant([100.0, 6e4], tf.float16)
    (unscaled_,) = unscaled([gradient], None, scale)
    expected = np.array([100.0, 6e4]) / scale
    # The least number of float16 is 2^-24, and what lies between two multiples of it is rounded.
    bound = np.maximum(rounding(expected, dtype="float16"), 2.0**-24)
    np.testing.assert_array_less(np.abs(unscaled_.numpy() - expected), bound)
