"""Trains with local steps and dense, on equal numbers of samples, and compares.

    GRADCOMP_DATA=FOLDER python benchmarks/local_steps_accuracy.py --jobs 2
    python benchmarks/local_steps_accuracy.py --reuse --only "digits-*" --seeds 1
    python benchmarks/local_steps_accuracy.py --only "digits-*2learners*" --training-steps 128

Learners in one process (`gc.simulation.Learners`) take rounds of 4, 16 and 64 steps, with the mean
of the weights and with Nesterov momentum outside, by several compressors. They are compared with
dense training, and with dense training on batches that are larger by the number of steps in a
round. Such training exchanges equally often. Its learning rate is that of dense training, or grows
with the root of the batch size, as Adam's should.

FOLDER has `shakespeare.txt.gz`, and `mnist.npz` where Keras cannot download it. Each run is a
separate process, and adds a record to benchmarks/records/local_steps.jsonl. `publish.py` makes
tables of docs/benchmarks/accuracy.md from the records, and `--tables` prints all of them. Runs of
the first pattern of --only come first, the longest of them before the others. Bytes are means over
steps and workers: a learner's payload, and the bytes that a ring of workers sends, both relative to
dense training. "Within 1 %" is of the metric: 1 % less accuracy, or 1 % more bits.
"""

from __future__ import annotations

import fnmatch
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import records
import simulated
from local_steps_runs import COMPRESSORS, INNER, STEPS, WORK, Grid, Job, compare, markdown
from output import show
from pool import Limits, do_all, missing_runs, pool_options
from rich.console import Console
from simulated import WORKLOADS

from tf_gradcomp.cli.options import results_folder, results_options

ROUNDS = (4, 16, 64)
COMPARED = ("none", "adacomp", "top-k")
LONGEST = 64  # of all rounds; the number of steps is a multiple of it
LEARNERS = (4, 2, 8)
READINGS = {task: WORKLOADS[task].reading for task in STEPS}


def in_order(jobs: Sequence[Job], only: Sequence[str]) -> list[Job]:
    """Returns the jobs that match a pattern, in the order in which they are begun.

    Raises:
        click.UsageError: If there are none.
    """
    rank_by_job = {}
    for job in jobs:
        matching = [i for i, pattern in enumerate(only) if fnmatch.fnmatch(job.name, pattern)]
        if matching or not only:
            rank_by_job[job] = (min(matching, default=0), job.seed, -WORK.seconds(job))
    if not rank_by_job:
        raise click.UsageError(f"No run matches {', '.join(only)}; one is {jobs[0].name}.")
    return sorted(rank_by_job, key=lambda job: rank_by_job[job])


def tables_of(file: Path) -> str:
    """The tables of all records in a file."""
    return markdown(rows_of(file), READINGS)


def rows_of(file: Path) -> list[records.Record]:
    """The rows of all records in a file."""
    return compare([*records.by_name(file).values()], READINGS)


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
_TRAINING = (
    f"Steps of dense training, in place of {min(steps for steps, _ in STEPS.values())} or more."
)
_RATES = "How many times the learning rate of dense training is."


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--only", multiple=True, metavar="PATTERN", help=_ONLY)
@click.option(
    "--rounds",
    multiple=True,
    default=ROUNDS,
    type=click.IntRange(2, LONGEST),
    callback=_check_rounds,
    help="Steps of a round. Give it several times to compare, as the next options.",
)
@click.option("--learners", multiple=True, default=LEARNERS, type=click.IntRange(min=2))
@click.option("--compressor", multiple=True, default=COMPARED, type=click.Choice(list(COMPRESSORS)))
@click.option("--warmup-steps", multiple=True, default=(0,), type=click.IntRange(min=0))
@click.option("--rate", multiple=True, default=(1.0,), type=float, help=_RATES)
@click.option("--inner", default="adam", type=click.Choice(INNER), help="Dense training's, too.")
@click.option("--seeds", default=3, type=click.IntRange(min=1), help="How many: 0, 1, ...")
@click.option("--training-steps", type=click.IntRange(min=1), callback=_check_steps, help=_TRAINING)
@pool_options
@results_options(str(records.FOLDER))
@click.option("--reuse", is_flag=True, help="Take runs that are there already.")
@click.option("--tables", is_flag=True, help="Only print the tables of all recorded runs.")
def main(
    only: Sequence[str],
    rounds: Sequence[int],
    learners: Sequence[int],
    compressor: Sequence[str],
    warmup_steps: Sequence[int],
    rate: Sequence[float],
    inner: str,
    seeds: int,
    training_steps: int | None,
    jobs: int,
    threads: int | None,
    minutes: float | None,
    results: Path,
    overwrite: bool,
    reuse: bool,
    tables: bool,
) -> None:
    if tables:
        print(tables_of(results / records.LOCAL_STEPS.name))
        return
    grid = Grid(rounds, compressor, warmup_steps, rate, inner)
    every = [
        job
        for many, task, seed in itertools.product(learners, STEPS, range(seeds))
        for job in grid.jobs(many, task, seed, training_steps or STEPS[task][0])
    ]
    wanted = in_order(every, only)
    for job in wanted:
        batch = WORKLOADS[job.task].reading.batch_size
        if batch % job.learners:
            raise click.UsageError(f"{job.learners} learners cannot share {batch} rows equally.")
    file = results_folder(results, [], overwrite) / records.LOCAL_STEPS.name
    missing = missing_runs(wanted, file, overwrite, reuse, "--reuse")
    simulated.check_data(dict.fromkeys(job.task for job in missing))
    failed = do_all(missing, file, WORK, Limits(jobs, threads, minutes), "--reuse")
    show(Console(), tables_of(file), [file])
    if failed:
        sys.exit(f"{failed} runs failed; their output is in {file.parent}.")


if __name__ == "__main__":
    main()
