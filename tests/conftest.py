"""Gives TensorFlow four logical CPU devices, so that one process can hold several replicas.

It can only be done before TensorFlow starts, hence here, whatever tests are run.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(7)
