"""Trains a task of time_to_accuracy.py dense by Horovod, as one rank of a job.

`Bench.by_horovod` starts it. Horovod begins to sum each gradient when it has been computed, and so
overlaps sending with the rest of the backward pass.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import click
import horovod.tensorflow as hvd
import keras
import simulated
import tensorflow as tf
from horovod_backend import initialize
from simulated import WORKLOADS, Training
from trainings import DIGITS, LARGE_TRANSFORMER, TEXT, TRANSFORMER

WORKLOAD = {task.name: task.name for task in (DIGITS, TRANSFORMER, LARGE_TRANSFORMER)}
WORKLOAD[TEXT.name] = "python"


def sum_by_horovod(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer apply the mean of the gradients of all ranks."""
    apply = optimizer.apply

    def apply_means(gradients: Sequence[tf.Tensor], variables: Sequence | None = None) -> None:
        # Horovod gathers the slices of an embedding; the sum of a small table is sent sooner.
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        apply([hvd.allreduce(gradient, op=hvd.Average) for gradient in dense], variables)

    optimizer.apply = apply_means


@click.command()
@click.argument("task", type=click.Choice(list(WORKLOAD)))
@click.option("--optimizer", required=True)
@click.option("--seed", type=int, required=True)
@click.option("--epochs", type=int, required=True)
@click.option("--steps-per-epoch", type=int, required=True)
@click.option("--interface", required=True, help="The network interface by which ranks send.")
@click.option("--history", type=click.Path(path_type=Path), required=True)
def main(
    task: str,
    optimizer: str,
    seed: int,
    epochs: int,
    steps_per_epoch: int,
    interface: str,
    history: Path,
) -> None:
    """Trains, and writes the time of a step in each epoch."""
    initialize(json.loads(os.environ.pop("TF_CONFIG")), interface)
    keras.utils.set_random_seed(seed)  # all ranks begin with the same weights
    steps = epochs * steps_per_epoch
    training = Training(WORKLOAD[task], hvd.size(), seed, steps, optimizer=optimizer)
    model, rows, held_out = WORKLOADS[training.task].make(training)
    sum_by_horovod(model.optimizer)
    job = simulated.common.Job(tf.distribute.get_strategy(), "horovod", hvd.size(), hvd.rank())
    batches = tf.data.Dataset.from_tensor_slices(rows).shuffle(len(rows[0]), seed=seed)
    batches = batches.batch(training.rows, drop_remainder=True)
    fitted = model.fit(
        job.local_part(batches, training.rows).repeat(),
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        validation_data=tf.data.Dataset.from_tensor_slices(held_out).batch(training.rows),
        callbacks=[simulated.common.StepTimer()],
        verbose=0,
    )
    if hvd.rank() == 0:
        simulated.common.write_history(str(history), fitted.history, model.optimizer)
    hvd.shutdown()


if __name__ == "__main__":
    main()
