"""Learners in one process, with models of Keras 2; that workers do the same is in test_jobs."""

import json

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

import tf_gradcomp as gc
from tests.bounds import training
from tf_gradcomp.cli.main import main

keras = tf.keras
PROGRAM = """
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc


def simulation_task(batch_size=16, seed=0):
    tf.keras.utils.set_random_seed(seed)
    x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    model = tf.keras.Sequential([tf.keras.layers.Input((8,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.05), "mse")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
    return gc.simulation.Task(model, batches, 32 // batch_size, (x, y))
"""


def new_model(optimizer="sgd"):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((3,), dtype="int32"), keras.layers.Embedding(6, 3)]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def test_learners_without_compression_are_keras_own_training():
    x = np.arange(48).reshape(16, 3) % 6
    y = x.sum(1).astype("float32")
    single, shared = (
        new_model(keras.optimizers.Adam(0.1, epsilon=0.5, clipnorm=0.5)) for _ in range(2)
    )
    single.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    batches = [(x[:8], y[:8]), (x[8:], y[8:])]
    gc.simulation.Learners(shared, 4, "no_compression").fit(batches, epochs=3)
    for expected, actual in zip(single.get_weights(), shared.get_weights(), strict=True):
        # Sums are over 8 rows, 6 words and 9 inputs.
        bound = training(gain=0.1 / 0.5, terms=8 + 6 + 9, steps=6)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


class DoublesPositiveSums(keras.layers.Layer):
    def call(self, inputs):
        if tf.reduce_sum(inputs) > 0:  # AutoGraph converts it in `fit`
            inputs = 2 * inputs
        return inputs


def test_layers_are_converted_as_in_fit():
    x = np.random.default_rng(0).uniform(0, 0.5, size=(16, 3)).astype("float32")
    x[8:] *= -1
    y = x.sum(1, keepdims=True)
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(keras.Sequential([DoublesPositiveSums(), keras.layers.Dense(1)]))
        models[-1].build((None, 3))
        models[-1].compile(keras.optimizers.SGD(0.1), "mse")
    single, shared = models
    single.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    gc.simulation.Learners(shared, 2, "no_compression").fit([(x[:8], y[:8]), (x[8:], y[8:])])
    for expected, actual in zip(single.get_weights(), shared.get_weights(), strict=True):
        # Sums are over 8 rows and 3 inputs. Inputs and errors are at most 1 and 3.
        bound = training(gain=0.1 * 2 * 4, terms=8 + 3, steps=2, gradients=6)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


def test_the_command_compares_methods(tmp_path):
    program, folder = tmp_path / "program.py", tmp_path / "results"
    program.write_text(PROGRAM)
    options = ["-n", "4", "-c", "adacomp(bin_sizes=4)", "-c", "no_compression", "--epochs", "2"]
    arguments = ["simulate", str(program), *options, "--no-plot", "--results", str(folder)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    runs = json.loads((folder / "simulation.json").read_text())
    assert [run["compressor"] for run in runs] == ["adacomp(bin_sizes=4)", "no_compression"]
    for run in runs:
        assert run["history"]["val_loss"][1] < run["history"]["val_loss"][0]


def test_models_that_cannot_be_simulated():
    bare = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="must be built, and compiled"):
        gc.simulation.Learners(bare, 2)
    with pytest.raises(ValueError, match="optimizer is already compressed"):
        gc.simulation.Learners(new_model(gc.CompressedOptimizer("sgd")), 2)
    scaler = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="scales losses or accumulates gradients"):
        gc.simulation.Learners(new_model(scaler), 2)
