"""A small model that the tests of Keras 2 train."""

import tensorflow as tf

keras = tf.keras


def small_model(optimizer):
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Input((2,), dtype="int32"), keras.layers.Embedding(6, 3)]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model
