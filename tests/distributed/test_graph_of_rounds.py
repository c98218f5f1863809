"""Local steps whose graph TensorFlow's Grappler optimizes, as in programs of users."""

from tests.workers import run_workers

PROGRAM = """
import keras
import numpy as np
import tensorflow as tf
import tf_gradcomp as gc

tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
strategy = gc.MultiWorkerMirroredStrategy()
with strategy.scope():
    layers = [keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    local_steps = gc.LocalSteps(16, fragments=6)  # one for each variable
    model.compile(gc.CompressedOptimizer(keras.optimizers.SGD(), local_steps=local_steps), "mse")
model.fit(np.ones((24, 4)), np.ones((24, 1)), batch_size=8, verbose=0)
"""


def test_tensorflow_optimizes_the_graph_and_warns_of_nothing():
    """Checks for what Grappler says of a cycle, and `tf.function` of many traces."""
    for worker in run_workers(PROGRAM, 2):
        assert "topological" not in worker.stderr
        assert "retracing" not in worker.stderr
