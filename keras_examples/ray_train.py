"""Training by Ray Train, which starts all workers again from the last checkpoint when one is lost.

pip install "tf-gradcomp[ray]"
python ray_train.py
python ray_train.py --workers 4 --epochs 20     # resumes with four workers
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
import keras
import numpy as np
import ray.train
from ray.train.tensorflow import TensorflowTrainer

import tf_gradcomp as gc

BATCH, STEPS = 64, 64  # rows of a batch over all workers, steps per epoch
FILE = "model.keras"


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """Stands in for your data."""
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH * STEPS, 64)).astype("float32")
    return x, np.argmax(x @ random.normal(size=(64, 10)), axis=1)


def build_model() -> keras.Model:
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, activation="relu")])
    model.add(keras.layers.Dense(10))
    model.compile(
        optimizer=gc.CompressedOptimizer(keras.optimizers.Adam()),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class Report(keras.callbacks.Callback):
    """Reports metrics on all workers, and a checkpoint on the chief."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Waits for all workers, as Ray's `report` does."""
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if gc.is_chief(self.model.distribute_strategy):
                self.model.save(Path(folder, FILE))  # includes the residuals of all workers
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, **(logs or {})}, checkpoint=checkpoint)


def train(config: dict[str, Any]) -> None:
    """Trains on one worker, whose TF_CONFIG Ray has set."""
    strategy = gc.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    checkpoint = ray.train.get_checkpoint()
    with strategy.scope():
        if checkpoint is None:
            model = build_model()
        else:
            with checkpoint.as_directory() as folder:
                model = keras.models.load_model(Path(folder, FILE))
    model.fit(
        *load_data(),
        batch_size=BATCH,
        epochs=config["epochs"],
        initial_epoch=int(model.optimizer.iterations.numpy()) // STEPS,
        callbacks=[Report()],
        verbose=0,
    )


def trainer(storage: str, workers: int, epochs: int, failures: int = 10) -> TensorflowTrainer:
    return TensorflowTrainer(
        train,
        train_loop_config={"epochs": epochs},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name="train",  # a run with an earlier run's name resumes it
            storage_path=str(Path(storage).absolute()),  # which all workers see
            failure_config=ray.train.FailureConfig(max_failures=failures),
        ),
    )


@click.command(context_settings={"show_default": True})
@click.option("--workers", default=2)
@click.option("--epochs", default=10, help="Epochs in total, over all runs.")
@click.option("--storage", default="ray_results", help="Folder for checkpoints.")
def main(workers: int, epochs: int, storage: str) -> None:
    """Train by Ray."""
    print(trainer(storage, workers, epochs).fit().metrics)


if __name__ == "__main__":
    main()
