"""`gradcomp advise`: says beforehand whether compression pays for a program."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from tf_gradcomp.advice import STEPS, STEPS_BEFORE, VARIABLE
from tf_gradcomp.cli.run import (
    Threads,
    program_command,
    report_end,
    run_job,
    thread_settings,
)
from tf_gradcomp.tf_config import VARIABLE as TF_CONFIG
from tf_gradcomp.tf_config import read_tf_config


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Measure whether compression pays for a training program.",
)
@click.option(
    "-n",
    "--workers",
    type=click.IntRange(min=1),
    help="How many local workers to start. Not where TF_CONFIG is set: there it is one of a job.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as in `python -m`.")
@click.option(
    "--threads-per-worker",
    type=Threads(),
    help="As for `gradcomp run`.",
)
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def advise(
    workers: int | None,
    module: bool,
    threads_per_worker: int | str | None,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run the first steps of PROGRAM, and predict its steps with several compressors.

    The program trains with gc.CompressedOptimizer. Its first steps are taken uncompressed; then all
    workers end, and what was found is printed: a table, and what to use or that it will not pay.

    Example: gradcomp advise -n 2 train.py --batch-size 64
    """
    if (TF_CONFIG in os.environ) == (workers is not None):
        raise click.UsageError(
            "Say how many workers to start (gradcomp advise -n 2 train.py), or set TF_CONFIG and "
            "start it on each worker of a job; one of the two."
        )
    command = [sys.executable, *program_command(program, module), *args]
    with tempfile.TemporaryDirectory(prefix="gradcomp-advise-") as folder:
        found = Path(folder, "advice.txt")
        env = {**os.environ, VARIABLE: str(found)}
        if workers is None:
            code, prints = _as_worker(command, env)
        else:
            env |= thread_settings(threads_per_worker, workers)
            result = run_job(command, workers, env, output="chief")
            report_end(result, shown_tails=False)
            code, prints = result.exit_code, True
        if code:
            sys.exit(code)
        if prints:
            _print(found)


def _as_worker(command: list[str], env: dict[str, str]) -> tuple[int, bool]:
    """Runs the program as the worker that TF_CONFIG says; only the chief's has something to say."""
    try:
        config = read_tf_config()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    done = subprocess.run(command, env=env, check=False)
    return done.returncode, config is not None and config.is_chief


def _print(found: Path) -> None:
    if not found.exists():
        raise click.ClickException(
            "The program ended before all was measured: it must train for at least "
            f"{STEPS_BEFORE + STEPS} steps, with gc.CompressedOptimizer."
        )
    click.echo(found.read_text(), nl=False)
