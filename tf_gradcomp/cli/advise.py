"""`gradcomp advise`: predicts whether compression pays for a program."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from tf_gradcomp.advice import STEPS, STEPS_BEFORE, VARIABLE
from tf_gradcomp.cli.job import addresses_of, report_end, run_job, run_rank
from tf_gradcomp.cli.options import Threads, Workers, json_option
from tf_gradcomp.cli.run import (
    check_scheduled,
    misplaced_workers_hint,
    program_command,
    thread_settings,
)
from tf_gradcomp.launch import Rank, is_started_alone, scheduled
from tf_gradcomp.tf_config import VARIABLE as TF_CONFIG
from tf_gradcomp.tf_config import read_tf_config

_LOOPBACK = (
    "The workers were on this machine, so the figures apply to its loopback and not to a "
    "cluster's network.\nTo measure a cluster, start gradcomp advise without -n on each machine\n"
    "of the cluster: by srun, by mpirun, or with TF_CONFIG (docs/advise.md)."
)


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Measure whether compression pays for a training program.",
)
@click.option(
    "-n",
    "--workers",
    type=Workers(min=1),
    help="Number of workers to start on this machine. The command then measures this machine's "
    "loopback, and not the network of a cluster. Leave this out under srun and mpirun, and if "
    "TF_CONFIG is set.",
)
@click.option("-m", "--module", is_flag=True, help="Run PROGRAM as a module, as `python -m` does.")
@click.option(
    "--threads-per-worker",
    type=Threads(),
    help="Threads for each worker's TensorFlow operations, or 'auto' to divide the cores among "
    "the workers.",
)
@json_option
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def advise(
    workers: int | None,
    module: bool,
    threads_per_worker: int | str | None,
    as_json: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run the first steps of PROGRAM, and predict its steps with several compressors.

    The program trains with gc.CompressedOptimizer. The program takes its first steps without
    compression. Then all workers end, and the command prints a table and a recommendation.

    To measure a cluster's network, start the command on the cluster's machines, once for each
    worker.

    \b
    Examples:
      gradcomp advise -n 2 train.py --batch-size 64     # this machine's loopback
      srun -N 2 gradcomp advise train.py --batch-size 64
      mpirun -H host1,host2 gradcomp advise train.py --batch-size 64
    """  # noqa: D301
    rank = None if TF_CONFIG in os.environ else scheduled()
    check_scheduled(rank, workers)
    if TF_CONFIG in os.environ and workers is not None:
        raise click.UsageError(
            "TF_CONFIG is set, so this process is one worker of a cluster: leave out -n to measure "
            "the cluster, or unset TF_CONFIG to start workers on this machine."
        )
    if workers is None and TF_CONFIG not in os.environ and is_started_alone():
        workers = 1
    if rank is None and TF_CONFIG not in os.environ and workers is None:
        raise click.UsageError(
            "Say how many workers to start on this machine (gradcomp advise -n 2 train.py)."
            f"{misplaced_workers_hint(args)} To measure a cluster, start gradcomp on each machine "
            "by srun, by mpirun or with TF_CONFIG, without -n."
        )
    command = [sys.executable, *program_command(program, module), *args]
    with tempfile.TemporaryDirectory(prefix="gradcomp-advise-") as folder:
        found = Path(folder, "advice.json" if as_json else "advice.txt")
        env = {
            **os.environ,
            VARIABLE: str(found),
            **thread_settings(threads_per_worker, workers or 1, rank),
        }
        if rank is not None:
            with addresses_of(rank) as addresses:
                result = run_rank(
                    rank,
                    addresses.workers,
                    command=command,
                    env=env,
                    output="chief",
                    all_to_stderr=as_json,
                )
        else:
            rank = _of_tf_config() if workers is None else None
            result = run_job(
                command,
                workers or 1,
                env,
                output="chief",
                part=rank,
                tf_config=workers is not None,
                all_to_stderr=as_json,
            )
        report_end(result, shown_tails=False)
        if result.exit_code:
            sys.exit(result.exit_code)
        if rank is None or rank.rank == 0:
            _print(found)
    if workers is not None and workers > 1 and not as_json:
        click.echo(_LOOPBACK)


def _of_tf_config() -> Rank:
    """The worker that this process is, by TF_CONFIG."""
    try:
        config = read_tf_config()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if config is None or config.rank is None:
        raise click.UsageError(
            "TF_CONFIG says that this process does not train: expected a worker."
        )
    return Rank(TF_CONFIG, config.rank, config.num_workers, here=1)


def _print(found: Path) -> None:
    if not found.exists():
        raise click.ClickException(
            "The program ended before the measurement was complete: it must train for at least "
            f"{STEPS_BEFORE + STEPS} steps, with gc.CompressedOptimizer."
        )
    click.echo(found.read_text(), nl=False)
