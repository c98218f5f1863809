"""Training programs as data: the variables, the optimizer, and the consecutive jobs.

The `repr` is the whole program, so a program that a test prints can be run again (see
CONTRIBUTING).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

STORE, WEIGHTS, CHECKPOINT = "store", "weights", "checkpoint"


class Short:
    """Has a `repr` without the fields that have their defaults."""

    def __repr__(self) -> str:
        given = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """As Hypothesis is to print it."""
        printer.text(repr(self))


@dataclasses.dataclass(frozen=True, repr=False)
class Step(Short):
    """A step of all replicas.

    Attributes:
        seed: Of the gradients.
        given: The variables that have one.
        bad: The replicas that have one which is not finite.
        times: How many such steps there are, with other seeds from this one on.
    """

    seed: int
    given: tuple[int, ...]
    bad: tuple[int, ...] = ()
    times: int = 1


@dataclasses.dataclass(frozen=True, repr=False)
class Job(Short):
    """A start of a program.

    Attributes:
        replicas: How many take part.
        compressor: As `gc.compressors.get` understands it.
        steps: In turn.
        rival: Another one, if `compressor` is what `gc.compressors.Auto` has chosen of the two.
        precondition: Of `gc.CompressedOptimizer`.
        collective: Whether the replicas talk by TensorFlow's collectives, which is for two.
        graph: Whether steps are traced; otherwise they run eagerly.
        resumes: How it takes over the state of the job before: by the optimizers' own stores,
            Keras' file of weights, or `tf.train.Checkpoint`.
    """

    replicas: int
    compressor: str
    steps: tuple[Step, ...]
    rival: str | None = None
    precondition: str | None = None
    collective: bool = False
    graph: bool = False
    resumes: str = STORE


@dataclasses.dataclass(frozen=True, repr=False)
class Program(Short):
    """Jobs that resume from each other, on the same variables with the same optimizer.

    Attributes:
        shapes: Of the variables.
        optimizer: The inner optimizer's class in `keras.optimizers`.
        settings: Its arguments.
        jobs: In turn.
        tables: Those variables that are embeddings, whose gradients are slices.
        scaler: Where a `LossScaleOptimizer` is: `"inside"`, `"around"`, or None.
        max_dense_elements: Of `gc.Policy`: tables of more stay sparse.
    """

    shapes: tuple[tuple[int, ...], ...]
    optimizer: str
    settings: Mapping[str, Any]
    jobs: tuple[Job, ...]
    tables: tuple[int, ...] = ()
    scaler: str | None = None
    max_dense_elements: int = 2**26

    @property
    def micro_steps(self) -> int:
        """The number of steps to one update."""
        return self.settings.get("gradient_accumulation_steps") or 1

    def rounds(self, job: Job) -> list[tuple[Step, ...]]:
        """The steps of a job, by the update that they lead to."""
        size = self.micro_steps
        steps = tuple(
            Step(step.seed + i, step.given, step.bad)
            for step in job.steps
            for i in range(step.times)
        )
        return [steps[i : i + size] for i in range(0, len(steps), size)]

    def stays_sparse(self, variable: int) -> bool:
        """Tells whether a gradient is exchanged as slices; means of accumulated ones are dense."""
        is_large = int(np.prod(self.shapes[variable])) > self.max_dense_elements
        return variable in self.tables and is_large and self.micro_steps == 1

    def without(self, *settings: str, **changes: Any) -> Program:
        """The same program without some of the optimizer's settings, and with other changes."""
        left = {name: value for name, value in self.settings.items() if name not in settings}
        return dataclasses.replace(self, settings=left, **changes)


@dataclasses.dataclass(frozen=True)
class Slices:
    """The gradient of a table: rows, some of them possibly several times."""

    values: np.ndarray
    indices: np.ndarray
    shape: tuple[int, ...]

    def dense(self) -> np.ndarray:
        total = np.zeros(self.shape, np.float32)
        np.add.at(total, self.indices, self.values)
        return total

    def merged(self) -> Slices:
        """With each row once."""
        indices = np.unique(self.indices)
        return Slices(self.dense()[indices], indices, self.shape)


Gradient: TypeAlias = np.ndarray | Slices


def dense(gradient: Gradient) -> np.ndarray:
    return gradient.dense() if isinstance(gradient, Slices) else gradient


def gradients_of(program: Program, step: Step, replica: int) -> list[Gradient]:
    """A replica's gradients, one for each variable that the step gives one.

    Numbers are small multiples of a power of two, so that their sums are exact in any order.
    """
    generator = np.random.default_rng([step.seed, replica])
    found: list[Gradient] = []
    for variable in step.given:
        shape = program.shapes[variable]
        if variable in program.tables:
            indices = generator.integers(0, shape[0], generator.integers(1, 5))
            found.append(Slices(_numbers(generator, (len(indices), *shape[1:])), indices, shape))
        else:
            found.append(_numbers(generator, shape))
    if replica in step.bad:
        spoilt = found[step.seed % len(found)]
        values = spoilt.values if isinstance(spoilt, Slices) else spoilt
        values.flat[-1] = (np.inf, -np.inf, np.nan)[step.seed % 3]
    return found


def _numbers(generator: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return (generator.integers(-16, 17, shape) / 16).astype(np.float32)


def initial(program: Program) -> list[np.ndarray]:
    """The variables before the first step."""
    generator = np.random.default_rng(len(program.shapes))
    return [_numbers(generator, shape) for shape in program.shapes]


def read(text: str) -> Program:
    """The program whose `repr` this is."""
    return eval(text, {"Program": Program, "Job": Job, "Step": Step})
