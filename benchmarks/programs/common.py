"""Shared code of the programs: data, training, times of steps, and reports."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import time
from pathlib import Path
from typing import Any

import click
import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc

Arrays = tuple[np.ndarray, np.ndarray]

IMAGES = ("digits", "mnist", "fashion_mnist", "cifar10")


def _check_compressor(_context: click.Context, _option: click.Parameter, name: str) -> str:
    try:
        gc.compressors.get(name)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return name


compressor_option = click.option(
    "--compressor",
    default="adacomp",
    metavar="adacomp|no_compression|...",
    callback=_check_compressor,
    help="Compress gradients by this method; no_compression sends them dense.",
)
precondition_option = click.option(
    "--precondition",
    default="auto",
    type=click.Choice(["auto", "local", "none"]),
    callback=lambda _context, _option, value: None if value == "none" else value,
    help="Divide gradients by Adam's second moment before they are compressed.",
)
local_steps_option = click.option(
    "--local-steps",
    type=click.IntRange(min=1),
    help="Exchange once in so many steps; without it, in each step.",
)
horovod_option = click.option(
    "--horovod",
    is_flag=True,
    help="Exchange gradients by Horovod, where horovodrun has started this program.",
)
history_option = click.option(
    "--history",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True),
    help="Write the measurements to this file, as JSON.",
)


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes that train together.

    Attributes:
        strategy: The strategy in whose scope models are created; the default strategy under
            Horovod.
        group: The group for `gc.CompressedOptimizer`.
        size: The number of processes.
        rank: This process's number, if each process takes its part of a batch by itself.
    """

    strategy: tf.distribute.Strategy
    group: str | None
    size: int
    rank: int

    def local_part(self, batches: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        """Returns this process's part of batches; under a strategy, `fit` takes it."""
        if self.group is None:
            return batches
        if batch_size % self.size:
            raise click.UsageError(f"{self.size} ranks cannot share {batch_size} rows equally.")
        return batches.map(
            lambda *batch: tf.nest.map_structure(lambda rows: rows[self.rank :: self.size], batch)
        )


def start_job(horovod: bool) -> Job:
    """Finds the other processes; must come before any other use of TensorFlow."""
    if not horovod:
        strategy = gc.MultiWorkerMirroredStrategy()
        return Job(strategy, None, strategy.num_replicas_in_sync, 0)
    import horovod.tensorflow as hvd

    hvd.init()
    return Job(tf.distribute.get_strategy(), "horovod", hvd.size(), hvd.rank())


def load_images(name: str, seed: int) -> tuple[Arrays, Arrays]:
    """Images in [0, 1] with a channel axis, and their labels: the training and the test set.

    Args:
        name: `"digits"`, which comes with scikit-learn, or a data set that `keras.datasets`
            downloads. Without a network, the environment variable GRADCOMP_DATA names a folder with
            its file, such as `mnist.npz`.
        seed: Selects the fifth of the digits that is the test set.
    """
    if name == "digits":
        return _load_digits(seed)
    folder = os.environ.get("GRADCOMP_DATA")
    if folder and (file := Path(folder, f"{name}.npz")).is_file():
        with np.load(file) as arrays:
            train, test = ((arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test"))
    else:
        train, test = getattr(keras.datasets, name).load_data()
    return _scaled(*train, 255), _scaled(*test, 255)


def _load_digits(seed: int) -> tuple[Arrays, Arrays]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.2, random_state=seed
    )
    return _scaled(train_x, train_y, 16), _scaled(test_x, test_y, 16)


def _scaled(images: np.ndarray, labels: np.ndarray, highest: float) -> Arrays:
    images = images.astype(np.float32) / highest
    if images.ndim == 3:
        images = images[..., np.newaxis]
    return images, labels.reshape(-1).astype(np.int32)


class StepTimer(keras.callbacks.Callback):
    """Logs `seconds_per_step`: the mean of each epoch's steps, without its slow first step."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Resets the callback."""
        self._ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the time."""
        self._ends.append(time.perf_counter())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the epoch's logs; NaN if the epoch had only one step."""
        if logs is not None:
            between = np.diff(self._ends)
            logs["seconds_per_step"] = float(between.mean()) if between.size else math.nan


def make_callbacks(job: Job) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of every program: the monitor first, so that others see its logs."""
    callbacks = [
        gc.callbacks.CompressionMonitor(),
        gc.callbacks.LayerwisePlan(),  # for --compressor lgreco; does nothing with other methods
        gc.callbacks.AutoencoderTraining(),  # likewise for lgc
        StepTimer(),
    ]
    if job.group:
        callbacks += [gc.callbacks.BroadcastInitialState(), gc.callbacks.CollectState()]
    return callbacks


def compiled(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, metric: Any = "accuracy"
) -> keras.Model:
    """Compiles a model whose outputs are logits of classes; returns the model."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=[metric])
    return model


def fit(
    job: Job,
    model: keras.Model,
    batches: tf.data.Dataset,
    callbacks: list[keras.callbacks.Callback] | None = None,
    **settings: Any,
) -> keras.callbacks.History:
    """Trains on this worker, by the callbacks of every program if none are given.

    Args:
        job: The job.
        model: A compiled model.
        batches: Batches that are shuffled already.
        callbacks: The callbacks in place of `make_callbacks(job)`.
        **settings: More arguments of Keras' `fit`.
    """
    return model.fit(
        batches,
        shuffle=False,
        callbacks=make_callbacks(job) if callbacks is None else callbacks,
        verbose=2 if gc.is_chief(job.strategy) else 0,
        **settings,
    )


def write_fitted(
    path: str | None,
    job: Job,
    model: keras.Model,
    fitted: keras.callbacks.History,
    steps_per_epoch: int,
) -> None:
    """Writes what `fit` has measured: see `write_history`."""
    write_history(
        path,
        fitted.history,
        model.optimizer,
        workers=job.size,
        weights=model.count_params(),
        steps_per_epoch=steps_per_epoch,
        peak_memory_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


def write_history(
    path: str | None,
    measured: dict[str, list[float]],
    optimizer: keras.optimizers.Optimizer,
    **facts: Any,
) -> None:
    """Writes the measurements of a run, and facts about it, as JSON.

    Args:
        path: The file; None writes nothing.
        measured: A value for each epoch, by name, as the `History` of Keras' `fit` has them.
        optimizer: The optimizer of the run; for a compressed optimizer, the traffic is written,
            too.
        **facts: JSON-serializable.
    """
    if path is None:
        return
    series = {name: [float(value) for value in values] for name, values in measured.items()}
    record = {**facts, **_exchanged(optimizer), "history": series}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def _exchanged(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """The method, which "auto" may have chosen, and the bytes; None for both without a method."""
    if not isinstance(optimizer, gc.CompressedOptimizer) or not optimizer.exchange.built:
        return {"compressor": None, "traffic": None}
    exchange = optimizer.exchange
    return {
        "compressor": gc.compressors.text_of(exchange.compressor),
        "traffic": traffic_by_variable(exchange),
    }


def traffic_by_variable(exchange: Any, earlier: Any = None) -> dict[str, Any]:
    """Returns the traffic of the first replica, after an `earlier` one if it is given.

    The result includes the kind and the number of elements of each variable.
    """
    traffic = exchange.traffic()
    variables = {
        spec.path: {"kind": spec.kind, "elements": spec.elements} for spec in exchange.specs
    }
    since = traffic.since(earlier) if earlier else traffic
    return {**dataclasses.asdict(since), "variables": variables}
