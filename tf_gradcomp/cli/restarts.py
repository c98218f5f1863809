"""Starts a job again when one of its workers has died."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import click

from tf_gradcomp.cli.job import report_end
from tf_gradcomp.environment import RESTARTS
from tf_gradcomp.launch import JobResult

Run = Callable[[float | None, Mapping[str, str]], JobResult]
"""Runs a job once, for at most a number of seconds, with more environment variables."""


def run_with_restarts(
    run: Run, max_restarts: int, timeout: float | None, *, shown_tails: bool
) -> list[JobResult]:
    """Runs a job, and runs it again each time that one of its workers has died.

    Args:
        run: Runs the job once.
        max_restarts: The maximum number of restarts.
        timeout: The number of seconds that all runs together may take.
        shown_tails: As for `report_end`.

    Returns:
        The end of each run.
    """
    started = time.monotonic()
    results: list[JobResult] = []
    while True:
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
        restarts = {RESTARTS: str(len(results))} if max_restarts else {}
        try:
            result = run(left, restarts)
        except (click.ClickException, KeyboardInterrupt) as error:
            if not results:
                raise
            reason = error.message if isinstance(error, click.ClickException) else "interrupted."
            _notify(f"no restart: {reason}")
            return results
        if result.timed_out is not None:
            result = dataclasses.replace(result, timed_out=timeout)
        results.append(result)
        by_user = result.stop_signal is not None or result.timed_out is not None
        if result.first_failure is None or by_user or not max_restarts:
            return results
        if len(results) > max_restarts:
            _notify(f"--max-restarts allows only {max_restarts}.")
            return results
        report_end(result, shown_tails=shown_tails)
        _notify(f"restart {len(results)} of {max_restarts}.")


def _notify(text: str) -> None:
    click.secho(f"gradcomp: {text}", err=True, fg="yellow")
