"""Trains with local steps and dense, on equal numbers of samples, and compares.

    GRADCOMP_DATA=FOLDER python benchmarks/local_steps_accuracy.py
    python benchmarks/local_steps_accuracy.py --only "digits-*" --seeds 1
    python benchmarks/local_steps_accuracy.py --reuse     # goes on where it was interrupted
    python benchmarks/local_steps_accuracy.py --short --only "digits-*"

Learners in one process (`gc.simulation.Learners`) take rounds of 4, 16 and 64 steps, with the mean
of the weights and with Nesterov momentum outside, by several compressors. They are compared with
dense training, and with dense training on batches that are as many times larger as a round has
steps: it exchanges as seldom. That has the learning rate of dense training, or a rate that grows
with the root of the batch, as Adam's should.

FOLDER has `shakespeare.txt.gz`, and `mnist.npz` where Keras cannot download it. Each run leaves a
record, and the tables are written after each. Bytes are those of a mean step and worker: what a
learner gives to be sent, and what a ring of workers sends, each beside dense training. "Within 1 %"
is of the metric: 1 % less accuracy, or 1 % more bits.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import simulated
from local_steps_tables import DENSE, compare, markdown
from output import show
from rich.console import Console
from simulated import WORKLOADS, Training
from trainings import RESULTS

from tf_gradcomp.cli.options import results_folder, results_options
from tf_gradcomp.cli.simulate import OUTER

ROUNDS = (4, 16, 64)
LONGEST = 64  # of all rounds; the number of steps is a multiple of it
COMPRESSORS = {
    "none": simulated.DENSE,
    "adacomp": "adacomp",
    "top-k": "top_k(density=0.05, value_bits=2, chunk=128)",
}
LEARNERS = (4, 2, 8)
SHORT_STEPS = 128
# The steps of dense training, in whole rounds of all lengths; and between two evaluations.
STEPS = {
    "digits": (704, 64),
    "mnist": (960, 192),
    "shakespeare": (1280, 256),
    "python": (1280, 256),
    "transformer": (1280, 256),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        task: Name of the workload.
        learners: The number of learners; 1 for dense training, which is equal for all numbers.
        seed: Seed of the weights and the order of the rows.
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
    steps: int = 1
    outer: str = "average"
    compressor: str = "none"
    warmup_steps: int = 0
    batch: int = 1
    rate: float = 1.0

    @property
    def training(self) -> str:
        """The job's name without task, learners and seed."""
        if self.steps > 1:
            warm_up = f"-warmup{self.warmup_steps}" if self.warmup_steps else ""
            return f"{self.steps}steps-{self.outer}-{self.compressor}{warm_up}"
        larger = f"-batch{self.batch}" if self.batch > 1 else ""
        return f"{DENSE}{larger}" + (f"-rate{self.rate:g}" if self.rate != 1 else "")

    @property
    def name(self) -> str:
        """The name of the job, and of its record."""
        return f"{self.task}-{self.learners}learners-{self.training}-seed{self.seed}"


def jobs_of(
    learners: int,
    task: str,
    seed: int,
    rounds: Sequence[int],
    compressors: Sequence[str],
    warmup_steps: int,
) -> Iterator[Job]:
    """Yields dense training, that with local steps, and dense training on larger batches."""
    yield Job(task, 1, seed)
    for steps, outer, compressor in itertools.product(rounds, OUTER, compressors):
        yield Job(task, learners, seed, steps, outer, compressor, warmup_steps)
    for times in rounds:
        for rate in (1.0, math.sqrt(times)):
            yield Job(task, 1, seed, batch=times, rate=rate)


def steps_of(job: Job, steps: int | None) -> int:
    """Returns the number of steps of a job that has the samples of so many dense steps."""
    return (steps or STEPS[job.task][0]) // job.batch


def train(job: Job, steps: int | None) -> dict[str, Any]:
    """Trains on as many samples as so many dense steps have; returns the record."""
    total = steps_of(job, steps)
    training = Training(
        job.task,
        job.learners,
        job.seed,
        total,
        COMPRESSORS[job.compressor],
        batch_size=job.batch * WORKLOADS[job.task].reading.batch_size,
        rate=job.rate,
    )
    local = {"steps": job.steps, "outer": OUTER[job.outer], "warmup_steps": job.warmup_steps}
    every = max(1, STEPS[job.task][1] // job.batch)
    record = simulated.train(training, every, local if job.steps > 1 else None)
    return {
        **dataclasses.asdict(job),
        "training": job.training,
        "training_steps": total,
        **record,
    }


def _check_reused(folder: Path, files: Mapping[Job, str], steps: int | None) -> None:
    for job, file in files.items():
        if (folder / file).exists():
            trained = json.loads((folder / file).read_text())["training_steps"]
            if trained != steps_of(job, steps):
                raise click.UsageError(
                    f"'{folder / file}' cannot be taken by --reuse: it is of {trained} steps, not "
                    f"of {steps_of(job, steps)}; give another folder by --results."
                )


def _check_steps(_context: Any, _option: Any, steps: int | None) -> int | None:
    if steps and steps % LONGEST:
        raise click.BadParameter(f"expected whole rounds: a multiple of {LONGEST}.")
    return steps


def _check_rounds(_context: Any, _option: Any, rounds: Sequence[int]) -> Sequence[int]:
    for steps in rounds:
        if LONGEST % steps:
            raise click.BadParameter(f"expected numbers of steps that divide {LONGEST}.")
    return rounds


_ONLY = 'Only runs whose name matches, such as "digits-4learners-*-seed0". Give it several times.'
_TRAINING = f"Of dense training, in place of {min(steps for steps, _ in STEPS.values())} or more."


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--only", multiple=True, metavar="PATTERN", help=_ONLY)
@click.option(
    "--rounds",
    multiple=True,
    default=ROUNDS,
    type=click.IntRange(2, LONGEST),
    callback=_check_rounds,
    help="Steps of a round. Give it several times to compare.",
)
@click.option("--learners", multiple=True, default=LEARNERS, type=click.IntRange(min=2))
@click.option(
    "--compressor", multiple=True, default=list(COMPRESSORS), type=click.Choice(list(COMPRESSORS))
)
@click.option("--seeds", default=3, type=click.IntRange(min=1), help="How many: 0, 1, ...")
@click.option("--warmup-steps", default=0, type=click.IntRange(min=0))
@click.option("--training-steps", type=click.IntRange(min=1), callback=_check_steps, help=_TRAINING)
@click.option("--short", is_flag=True, help=f"Take {SHORT_STEPS} steps, two learners and a seed.")
@results_options(str(RESULTS))
@click.option("--reuse", is_flag=True, help="Take runs that are there already.")
def main(
    only: Sequence[str],
    rounds: Sequence[int],
    learners: Sequence[int],
    compressor: Sequence[str],
    seeds: int,
    warmup_steps: int,
    training_steps: int | None,
    short: bool,
    results: Path,
    overwrite: bool,
    reuse: bool,
) -> None:
    if short:
        learners, seeds, training_steps = (2,), 1, SHORT_STEPS
    wanted = itertools.product(learners, STEPS, range(seeds))
    listed = [job for one in wanted for job in jobs_of(*one, rounds, compressor, warmup_steps)]
    jobs = [
        job
        for job in dict.fromkeys(listed)
        if not only or any(fnmatch.fnmatch(job.name, pattern) for pattern in only)
    ]
    if not jobs:
        raise click.UsageError(f"No run matches {', '.join(only)}; one is {listed[0].name}.")
    simulated.check_data(dict.fromkeys(job.task for job in jobs))
    for job in jobs:
        batch = WORKLOADS[job.task].reading.batch_size
        if batch % job.learners:
            raise click.UsageError(f"{job.learners} learners cannot share {batch} rows equally.")
    tables = [f"local-steps.{suffix}" for suffix in ("json", "md")]
    files = {job: f"local-steps/{job.name}.json" for job in jobs}
    kept = [] if reuse else list(files.values())
    folder = results_folder(results, [*tables, *kept], overwrite or reuse)
    (folder / "local-steps").mkdir(exist_ok=True)
    _check_reused(folder, files, training_steps)
    readings = {task: workload.reading for task, workload in WORKLOADS.items()}
    records, text = [], ""
    for number, (job, file) in enumerate(files.items(), 1):
        if not (folder / file).exists():
            record = train(job, training_steps)
            (folder / file).write_text(json.dumps(record, indent=1) + "\n")
            said = f"{record['quality']:.3f}, {record['seconds']:.0f} s"
            print(f"{number} of {len(jobs)}: {job.name}: {said}", flush=True)
        records.append(json.loads((folder / file).read_text()))
        rows = compare(records, readings)
        text = markdown(rows, readings)
        (folder / tables[0]).write_text(json.dumps(rows, indent=1) + "\n")
        (folder / tables[1]).write_text(text)
    show(Console(), text, [folder / file for file in tables])


if __name__ == "__main__":
    main()
