"""`gradcomp advise`: predicts whether compression pays for a program."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import click

from tf_gradcomp.advice import STEPS, STEPS_BEFORE, VARIABLE
from tf_gradcomp.cli.options import Workers, json_option
from tf_gradcomp.cli.run import (
    NOT_UNDER_SCHEDULER,
    misplaced_workers_hint,
    program_command,
    refuse,
    shown_errors,
)
from tf_gradcomp.launch import Rank, addresses_of_ranks, end_rank, find_rank
from tf_gradcomp.launch.job import report_end, run_job
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
@json_option
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def advise(
    workers: int | None,
    module: bool,
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
    has_tf_config = TF_CONFIG in os.environ
    rank = None if has_tf_config else find_rank()
    if has_tf_config and workers is not None:
        raise click.UsageError(
            "TF_CONFIG is set, so this process is one worker of a cluster: leave out -n to measure "
            "the cluster, or unset TF_CONFIG to start workers on this machine."
        )
    if rank is not None and rank.is_alone:
        rank, workers = None, workers or 1
    if rank is not None:
        refuse({"-n": workers}, NOT_UNDER_SCHEDULER, rank.description)
    elif workers is None and not has_tf_config:
        raise click.UsageError(
            "Say how many workers to start on this machine (gradcomp advise -n 2 train.py)."
            f"{misplaced_workers_hint(args)} To measure a cluster, start gradcomp on each machine "
            "by srun, by mpirun or with TF_CONFIG, without -n."
        )
    command = [sys.executable, *program_command(program, module), *args]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradcomp-advise-"))
        advice = Path(folder, "advice.json" if as_json else "advice.txt")
        addresses = None
        if rank is not None:
            with shown_errors(RuntimeError):
                addresses = stack.enter_context(addresses_of_ranks(rank))
        if has_tf_config:
            rank = _rank_by_tf_config()
        result = run_job(
            command,
            workers or 1,
            {**os.environ, VARIABLE: str(advice)},
            output="chief",
            rank=rank,
            addresses=addresses,
            tf_config=not has_tf_config,
            all_to_stderr=as_json,
        )
        report_end(result, shown_tails=False)
        if result.exit_code:
            sys.exit(result.exit_code)
        if rank is None or rank.rank == 0:
            _print(advice)
        end_rank()
    if workers is not None and workers > 1 and not as_json:
        click.echo(_LOOPBACK)


def _rank_by_tf_config() -> Rank:
    """Returns the rank of this process among the workers of TF_CONFIG."""
    try:
        config = read_tf_config()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if config is None or config.rank is None:
        raise click.UsageError(
            "TF_CONFIG says that this process does not train: expected a worker."
        )
    return Rank(TF_CONFIG, config.rank, config.num_workers, is_on_one_machine=False)


def _print(advice: Path) -> None:
    if not advice.exists():
        raise click.ClickException(
            "The program ended before the measurement was complete: it must train for at least "
            f"{STEPS_BEFORE + STEPS} steps, with gc.CompressedOptimizer."
        )
    click.echo(advice.read_text(), nl=False)
