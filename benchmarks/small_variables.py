"""Measures how long small variables wait, compared with large variables, by method, with Adam.

    python benchmarks/small_variables.py
    python benchmarks/small_variables.py --learners 8 --steps 200 -c adacomp -c scalecom

Learners train a network on scikit-learn's digits. The network has two squeeze-and-excite blocks,
LayerNorm scales, a scalar temperature and a head with two outputs. "First" is the step in which the
last of these variables moves for the first time. "Half" is the step by which half of their elements
have moved.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import keras
import numpy as np

import tf_gradcomp as gc

sys.path.append(str(Path(__file__).resolve().parents[1] / "keras_examples"))

import common

METHODS = ("no_compression", "adacomp", "scalecom", "lgc", "top_k", "random_k", "qsgd", "power_sgd")
KINDS = {
    "squeeze and excite": "squeeze|excite",
    "LayerNorm": "norm",
    "temperature": "temperature",
    "head of two": "parity",
}
BATCH = 64


@keras.saving.register_keras_serializable("benchmarks")
class Temperature(keras.layers.Layer):
    """Divides logits by a number that is learned."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Creates the number."""
        self.value = self.add_weight(shape=(), initializer="ones", name="value")

    def call(self, logits):
        """Returns the logits, divided."""
        return logits / self.value


def build_model() -> keras.Model:
    """Returns the network: digits, and whether they are odd."""
    layers = keras.layers
    inputs = keras.Input((8, 8, 1))
    x = inputs
    for i, filters in enumerate((32, 64)):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        gate = layers.GlobalAveragePooling2D()(x)
        gate = layers.Dense(filters // 8, activation="silu", name=f"squeeze_{i}")(gate)
        gate = layers.Dense(filters, activation="sigmoid", name=f"excite_{i}")(gate)
        x = layers.Multiply()([x, layers.Reshape((1, 1, filters))(gate)])
    x = layers.LayerNormalization(name="norm_0")(layers.Flatten()(layers.MaxPooling2D()(x)))
    x = layers.LayerNormalization(name="norm_1")(layers.Dense(128, activation="relu")(x))
    digit = Temperature(name="temperature")(layers.Dense(10)(x))
    return keras.Model(inputs, [digit, layers.Dense(2, name="parity")(x)])


class Moves:
    """Notes when small variables and their elements first move.

    Args:
        variables: The variables.
    """

    def __init__(self, variables: list[keras.Variable]) -> None:
        self._variables = variables
        self._start = self._values()
        self._first = [np.zeros(start.size, int) for start in self._start]

    def note(self, step: int) -> None:
        """Compares the variables with their start; the first step is 1."""
        for first, start, now in zip(self._first, self._start, self._values(), strict=True):
            first[(now != start) & (first == 0)] = step

    def summary(self) -> str:
        """Returns when the last variable first moved, and when half of all elements had moved."""
        moved = [first[first > 0] for first in self._first]
        variable = max(one.min() for one in moved) if all(map(len, moved)) else "never"
        elements = np.concatenate(self._first)
        half = np.sort(np.where(elements > 0, elements, np.inf))[(elements.size - 1) // 2]
        return f"{variable} | {half:.0f}"

    def _values(self) -> list[np.ndarray]:
        return [np.ravel(variable.numpy()) for variable in self._variables]


def measure(method: str, learners: int, steps: int) -> list[str]:
    """Returns the cells of a method's row."""
    keras.utils.set_random_seed(0)
    (images, labels), _ = common.load_images("digits", 0)
    model = build_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss=[loss, loss])
    job = gc.simulation.Learners(model, learners, method)
    small = {
        kind: Moves([v for v in model.trainable_variables if _is_small(v, names)])
        for kind, names in KINDS.items()
    }
    generator, ratio = np.random.default_rng(0), []
    for step in range(1, steps + 1):
        batch = generator.choice(len(images), BATCH, replace=False)
        report = job.train_on_batch(images[batch], (labels[batch], labels[batch] % 2))
        ratio.append(report.dense_bytes / report.payload_bytes)
        for moves in small.values():
            moves.note(step)
    return [method, *(moves.summary() for moves in small.values()), f"{np.mean(ratio):.0f}"]


def _is_small(variable: keras.Variable, names: str) -> bool:
    vector = len(variable.shape) < 2 and np.prod(variable.shape) <= 128
    return vector and any(name in variable.path for name in names.split("|"))


@click.command()
@click.option("--learners", default=4)
@click.option("--steps", default=60)
@click.option("-c", "--compressor", "methods", multiple=True, default=METHODS)
def main(learners: int, steps: int, methods: tuple[str, ...]) -> None:
    """Prints the table."""
    heads = " | ".join(f"{kind}: first | half" for kind in KINDS)
    print(f"| method | {heads} | payload ratio |")
    print("|---" * (2 * len(KINDS) + 2) + "|")
    for method in methods:
        print(f"| {' | '.join(measure(method, learners, steps))} |", flush=True)


if __name__ == "__main__":
    main()
