"""Measures which share of the residuals has been delayed for many steps.

Learners in one process train a program's model by each method. The table has the smallest and the
largest cosine that `gc.callbacks.DelayCheck` logs.

    python benchmarks/delays.py keras_examples/digits_cnn.py --steps 300 -c adacomp -c random_k
    python benchmarks/delays.py keras_examples/char_lstm.py --steps 300 -c adacomp -c scalecom
"""

from __future__ import annotations

import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import numpy as np
from machine import processor

import tf_gradcomp as gc
from tf_gradcomp.keras.callbacks.delay_check import cosine
from tf_gradcomp.simulation.task import load


def cosines(program: str, method: str, learners: int, steps: int, every: int) -> list[float]:
    """Returns the cosine of the first learner at each check."""
    task = load(program)(seed=0)
    policy = gc.Policy.from_model(task.model)
    job = gc.simulation.Learners(task.model, learners, method, policy, graph=True)
    before: list[np.ndarray] = []
    found = []
    batches = itertools.chain.from_iterable(itertools.repeat(task.batches))
    for step, (x, y) in enumerate(itertools.islice(batches, steps), 1):
        job.train_on_batch(x, y)
        if step % every == 0:
            now = [np.array(residual) for residual in job.exchange.residuals[0]]
            found.append(cosine(before, now))
            before = now
    return found


@click.command(context_settings={"show_default": True})
@click.argument("program")
@click.option("-c", "--compressor", "methods", multiple=True, required=True)
@click.option("-n", "--learners", default=4)
@click.option("--steps", default=300)
@click.option("--every", default=100)
def main(program: str, methods: tuple[str, ...], learners: int, steps: int, every: int) -> None:
    """Prints a table, a row for each method."""
    print(f"{program}: {learners} learners, {steps} steps, {processor()}\n")
    print("| method | smallest cosine | largest cosine |\n|---|---|---|")
    for method in methods:
        later = cosines(program, method, learners, steps, every)[1:]
        print(f"| `{method}` | {min(later):.2f} | {max(later):.2f} |", flush=True)


if __name__ == "__main__":
    main()
