"""Runs the README's programs and the shortest example."""

import re
from pathlib import Path

import pytest

from tests.workers import run_workers

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = ROOT / "keras_examples" / "minimal.py"

# The parts that the README leaves to the reader.
OF_THE_READER = """
import keras
import numpy as np
import tensorflow as tf
import tf_gradcomp as gc

def build_model():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(64), keras.layers.Dense(1)])

def load_data():
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(32)
"""
AFTERWARDS = """
print("losses", *model.history.history["loss"])
print("exchanged by", strategy.gradient_exchange(model.trainable_variables).compressor.name
      if strategy.compressor is not None else model.optimizer.exchange.compressor.name)
"""


def programs():
    """Returns the README's programs that use a strategy."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    return [block for block in blocks if "MultiWorkerMirroredStrategy" in block]


@pytest.mark.parametrize("number", [0, 1], ids=["optimizer", "strategy"])
def test_a_program_of_the_readme_trains_with_compression(number):
    assert len(programs()) == 2
    workers = run_workers(OF_THE_READER + programs()[number] + AFTERWARDS)
    for worker in workers:
        losses, used = worker.stdout.splitlines()[-2:]
        first, *_, last = map(float, losses.split()[1:])
        assert last < first
        assert used == "exchanged by adacomp"


def test_the_shortest_example_learns_and_marks_its_three_lines():
    lines = MINIMAL.read_text().splitlines()
    assert len(lines) <= 30
    marked = [line.strip() for line in lines if re.search(r"# \(\d\)", line)]
    for line, call in zip(
        marked,
        ["MultiWorkerMirroredStrategy(", "strategy.scope()", "CompressedOptimizer("],
        strict=True,
    ):
        assert call in line
    chief, other = run_workers(MINIMAL)
    accuracies = [float(a) for a in re.findall(r" accuracy: (\S+)", chief.stdout)]
    assert len(accuracies) == 5
    assert accuracies[-1] > 0.85 > accuracies[0]
    assert "Epoch" not in other.stdout


def test_a_strategy_that_comes_too_late_is_an_error():
    program = """
    import sys
    import tensorflow as tf
    import tf_gradcomp as gc

    tf.zeros(1)
    try:
        gc.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        print(error)
    """
    for worker in run_workers(program):
        assert "create the strategy at the top of the program" in worker.stdout
