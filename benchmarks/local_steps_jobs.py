"""The trainings of local_steps_accuracy.py: which there are, and how one is done."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import simulated
from local_steps_tables import DENSE
from pool import Work
from records import rounded
from simulated import WORKLOADS, Training

from tf_gradcomp.cli.simulate import OUTER

COMPRESSORS = {
    "none": simulated.DENSE,
    "adacomp": "adacomp",
    "top-k": "top_k(density=0.05, value_bits=2, chunk=128)",
    "top-k-0.04": "top_k(density=0.04, value_bits=2, chunk=128)",
}
# The steps of dense training, in whole rounds of all lengths; and between two evaluations.
STEPS = {
    "digits": (704, 64),
    "mnist": (320, 192),
    "shakespeare": (640, 128),
    "python-small": (960, 192),
    "transformer": (448, 128),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        task: Name of the workload.
        learners: The number of learners; 1 for dense training, which is equal for all numbers.
        seed: Seed of the weights and the order of the rows.
        dense_steps: The number of steps on batches of the task's own size.
        steps: The number of steps in a round; 1 for dense training.
        outer: Name of the outer optimizer.
        compressor: A key of `COMPRESSORS`.
        warmup_steps: The number of synchronous steps before the first round.
        batch: How many times the batch is larger than the task's.
        rate: How many times the learning rate is.
    """

    task: str
    learners: int
    seed: int
    dense_steps: int
    steps: int = 1
    outer: str = "average"
    compressor: str = "none"
    warmup_steps: int = 0
    batch: int = 1
    rate: float = 1.0

    @property
    def training(self) -> str:
        """The job's name without the task, its steps, the learners and the seed."""
        rounds = [f"rounds{self.steps}", self.outer, self.compressor]
        parts = rounds if self.steps > 1 else [DENSE]
        parts += [f"warmup{self.warmup_steps}"] if self.warmup_steps else []
        parts += [f"batch{self.batch}"] if self.batch > 1 else []
        parts += [f"rate{self.rate:g}"] if self.rate != 1 else []
        return "-".join(parts)

    @property
    def name(self) -> str:
        """The name of the job, and of its record."""
        task = f"{self.task}-{self.dense_steps}steps-{self.learners}learners"
        return f"{task}-{self.training}-seed{self.seed}"

    @property
    def whole(self) -> Training:
        """The training, but for the local steps: on as many samples as the dense steps have."""
        return Training(
            self.task,
            self.learners,
            self.seed,
            self.dense_steps // self.batch,
            COMPRESSORS[self.compressor],
            batch_size=self.batch * WORKLOADS[self.task].reading.batch_size,
            rate=self.rate,
        )


@dataclasses.dataclass(frozen=True)
class Grid:
    """The values of which each combination is a job: see the attributes of `Job`."""

    rounds: Sequence[int]
    compressors: Sequence[str]
    warmups: Sequence[int]
    rates: Sequence[float]

    def jobs(self, learners: int, task: str, seed: int, dense_steps: int) -> Iterator[Job]:
        """Yields dense training, that with local steps, and dense training on larger batches."""
        dense = Job(task, 1, seed, dense_steps)
        for rate in dict.fromkeys((1.0, *self.rates)):
            yield dataclasses.replace(dense, rate=rate)
        for steps, *others, rate in itertools.product(
            self.rounds, OUTER, self.compressors, self.warmups, self.rates
        ):
            yield Job(task, learners, seed, dense_steps, steps, *others, rate=rate)
        for times in self.rounds:
            for rate in (1.0, math.sqrt(times)):
                yield dataclasses.replace(dense, batch=times, rate=rate)


def _measure(job: Job) -> dict[str, Any]:
    """Trains; returns the record."""
    local = {"steps": job.steps, "outer": OUTER[job.outer], "warmup_steps": job.warmup_steps}
    every = max(1, STEPS[job.task][1] // job.batch)
    record = simulated.train(job.whole, every, local if job.steps > 1 else None)
    del record["traffic"]  # by variable: no table has it
    return {**dataclasses.asdict(job), "training": job.training, **rounded(record)}


def _seconds(job: Job) -> float:
    return simulated.expected_seconds(job.whole)


def _said(record: dict[str, Any]) -> str:
    return f"{record['quality']:.3f}, {record['seconds']:.0f} s"


WORK = Work(_measure, _seconds, _said)
