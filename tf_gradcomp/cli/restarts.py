"""Starts a job again when one of its workers has died."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping

import click

from tf_gradcomp.cli.job import report_end
from tf_gradcomp.environment import SAVES
from tf_gradcomp.launch import JobResult

Run = Callable[[float | None, Mapping[str, str]], JobResult]


def run_restarting(
    run: Run, most: int, timeout: float | None = None, *, shown_tails: bool
) -> tuple[JobResult, int]:
    """Runs a job, and runs it again when a worker has died.

    After two consecutive runs without a save, the job is not restarted: it would die again.

    Args:
        run: Runs the job once, for at most a number of seconds, with additional environment
            variables.
        most: The maximum number of restarts.
        timeout: The number of seconds that all runs together may take.
        shown_tails: As for `report_end`.

    Returns:
        The result to report, of the last run or of the first of two runs without a save; and the
        number of restarts.
    """
    if most == 0:
        return run(timeout, {}), 0
    started = time.monotonic()
    restarts = 0
    without_progress: JobResult | None = None
    with tempfile.NamedTemporaryFile(prefix="gradcomp-saves-") as saves:
        while True:
            saved = os.stat(saves.name).st_size
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
            result = run(left, {SAVES: saves.name})
            if result.timed_out is not None:
                result = dataclasses.replace(result, timed_out=timeout)
            if not _died(result):
                return result, restarts
            if os.stat(saves.name).st_size > saved:
                without_progress = None
            elif without_progress is not None:
                _print_notice(
                    "two runs in a row died without a save, so another run would die, too."
                )
                return without_progress, restarts
            else:
                without_progress = result
            if restarts == most:
                _print_notice(f"--max-restarts allows only {most}.")
                return result, restarts
            report_end(result, shown_tails=shown_tails)
            restarts += 1
            nothing = "" if os.stat(saves.name).st_size else ", from zero: nothing has been saved"
            _print_notice(f"restart {restarts} of {most}{nothing}.")


def _died(result: JobResult) -> bool:
    by_user = result.stop_signal is not None or result.timed_out is not None
    return result.first_failure is not None and not by_user


def _print_notice(notice: str) -> None:
    click.secho(f"gradcomp: {notice}", err=True, fg="yellow")
