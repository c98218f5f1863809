"""Tests that workers compare the settings of the inner optimizer, of any type."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tf_gradcomp.keras.common.inner import facts_of


class WithoutConfig(keras.optimizers.schedules.LearningRateSchedule):
    """As in TensorFlow's tutorial on Transformers."""

    def __call__(self, step):
        return 0.5 / (tf.cast(step, tf.float32) + 1)


RATES = {
    "a schedule without get_config": WithoutConfig,
    "a function": lambda: functools.partial(float, 0.5),
}


@pytest.mark.parametrize("rate", RATES)
def test_a_learning_rate_that_cannot_be_saved_trains(rate):
    variables = [keras.Variable(np.zeros(3, "float32"), name="kernel") for _ in range(2)]
    plain = keras.optimizers.SGD(RATES[rate]())
    compressed = gc.CompressedOptimizer(keras.optimizers.SGD(RATES[rate]()))
    for _ in range(2):
        plain.apply([tf.ones(3)], variables[:1])
        compressed.apply([tf.ones(3)], variables[1:])
    np.testing.assert_array_equal(*variables)
    assert facts_of("inner optimizer", compressed.inner_optimizer) == {
        "inner optimizer's class": '"SGD"'
    }


def test_numbers_that_keras_gives_shared_objects_are_left_out():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    optimizer = keras.optimizers.Adam(schedule)
    with keras.src.saving.serialization_lib.ObjectSharingScope():
        seen = [facts_of("optimizer", optimizer) for _ in range(2)]
    assert seen[0] == seen[1]
    assert "ExponentialDecay" in seen[0]["optimizer's learning_rate"]


def test_a_model_with_a_schedule_trains_on_after_loading(tmp_path):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(schedule))
    model.compile(gc.CompressedOptimizer(scaler), "mse")
    model.fit(tf.ones((4, 2)), tf.ones((4, 1)), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    facts = facts_of("optimizer", loaded.optimizer.inner_optimizer)
    assert facts == facts_of("optimizer", model.optimizer.inner_optimizer)
    assert "shared_object_id" not in str(facts)
