"""Trains by `ray_train.py` on two workers, one of which dies, and then on one: FOLDER.

All gradients are whole numbers, so that every sum is exact: applied plus unsent gradients equal all
gradients.
"""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import ray
import ray_train

import tf_gradcomp as gc

FOLDER = "RAY_TEST_FOLDER"  # a variable of the environment, which workers inherit
FEATURES, OUTPUTS, DIES = 50, 4, 2


def whole_numbers():
    random = np.random.default_rng(0)
    rows = ray_train.BATCH * ray_train.STEPS
    return [random.integers(-1, 2, (rows, n)).astype("float32") for n in (FEATURES, OUTPUTS)]


class Linear(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.sum(y_true * y_pred, axis=-1)


def linear_model():
    dense = keras.layers.Dense(OUTPUTS, kernel_initializer="zeros", use_bias=False)
    model = keras.Sequential([keras.Input((FEATURES,)), dense])
    optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0), "top_k(density=0.02)")
    model.compile(optimizer, Linear(reduction="sum"))
    optimizer.build(model.trainable_variables)
    return model


class Watch(ray_train.Report):
    """Reports how much was lost, as the checkpoint has it, and lets a worker die once."""

    def on_epoch_begin(self, epoch, logs=None):
        rank, died = ray.train.get_context().get_world_rank(), Path(os.environ[FOLDER], "died")
        if epoch == DIES and rank == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch, logs=None):
        x, y = whole_numbers()
        (unsent,) = [np.asarray(total) for total in self.model.optimizer.exchange.residuals]
        (weights,) = self.model.get_weights()
        logs = {
            **logs,
            "lost": float(np.abs((epoch + 1) * (x.T @ y) + weights - unsent).max()),
            "unsent": float(np.abs(unsent).sum()),
            "workers": self.model.distribute_strategy.num_replicas_in_sync,
            "keras": keras.__version__,
            "kind": type(self.model).__module__.partition(".")[0],
        }
        super().on_epoch_end(epoch, logs)


def train(config):
    keras.saving.register_keras_serializable()(Linear)  # in each process, before a model is loaded
    ray_train.load_data, ray_train.build_model = whole_numbers, linear_model
    ray_train.Report = Watch
    ray_train.train(config)


def run(workers, epochs, **settings):
    """Returns the metrics that Ray has kept with each checkpoint."""
    trainer = ray_train.trainer(os.environ[FOLDER], workers, epochs, failures=1)
    trainer.run_config = dataclasses.replace(trainer.run_config, **settings)
    return [metrics for _, metrics in trainer.fit().best_checkpoints]


if __name__ == "__main__":
    os.environ[FOLDER] = sys.argv[1]
    ray_train.train = train  # which in workers calls the example's
    with ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False):
        # The second run's worker is not forked: TensorFlow is imported there as for users.
        own = {"py_executable": os.environ["PRELOADED_PYTHON"]}
        found = {"two": run(2, 4), "one": run(1, 5, worker_runtime_env=own)}
    print(json.dumps(found))
