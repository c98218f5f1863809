"""Starts a job again when one of its workers has died."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import click

from tf_gradcomp.cli.job import report_end
from tf_gradcomp.environment import SAVED, SAVES
from tf_gradcomp.launch import JobResult, Slots

Run = Callable[[Sequence[int], Any, float | None, Mapping[str, str]], JobResult]
"""Runs a job once: in some slots, with the latest survey, for at most a number of seconds, with
more environment variables."""


class Survey(Protocol):
    """The places for workers before a run."""

    @property
    def slots(self) -> Collection[int]:
        """The slots that can run workers."""

    @property
    def problems(self) -> Sequence[str]:
        """A line for each place that cannot, such as a host."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a job."""

    result: JobResult  # of the last run, or of the first of two runs that died in the same way
    runs: Sequence[tuple[Sequence[int], JobResult]]  # each with the slots of its workers
    is_told: bool = True  # False if another process tells the user

    def as_dict(self) -> dict[str, Any]:
        """Returns the end and all runs, JSON-serializable."""
        runs = [
            {"slots": list(slots), **{key: run.as_dict()[key] for key in _OF_EACH_RUN}}
            for slots, run in self.runs
        ]
        return {**self.result.as_dict(), "restarts": len(runs) - 1, "runs": runs}


_OF_EACH_RUN = ("exit_code", "first_failure")
_LOOK_AGAIN = 3.0  # seconds between two surveys


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the restarts of a job.

    Attributes:
        restarts: The maximum number of restarts.
        timeout: The number of seconds that all runs together may take.
        wait: The number of seconds that a restart may wait until enough workers can be started.
    """

    restarts: int
    timeout: float | None
    wait: float = 0.0


class Restarts:
    """Runs a job, and runs it again when a worker has died.

    Args:
        run: Runs the job once.
        slots: Decides which workers take part in a run.
        survey: Looks at the places for workers before a run; None if they are always there.
        limits: When to give up.
        shown_tails: As for `report_end`.
        tells: Whether to print why and how the job is restarted.
    """

    def __init__(
        self,
        run: Run,
        slots: Slots,
        survey: Callable[[], Survey] | None,
        limits: Limits,
        *,
        shown_tails: bool,
        tells: bool = True,
    ) -> None:
        self._run_once = run
        self._slots = slots
        self._survey = survey
        self._limits = limits
        self._shown_tails = shown_tails
        self._tells = tells
        self._runs: list[tuple[Sequence[int], JobResult]] = []
        self._restarts = 0
        self._used: Sequence[int] = range(slots.number)
        self._places: Survey | None = None
        self._started = time.monotonic()

    def run(self) -> Ended:
        """Runs the job until it has ended for good."""
        if self._survey:
            self._places = self._survey()
            if self._places.problems:
                problems = "\n".join(self._places.problems)
                raise click.ClickException(f"workers cannot be started on\n{problems}")
        self._started = time.monotonic()
        if self._limits.restarts == 0:
            result = self._run_once(self._used, self._places, self._limits.timeout, {})
            return Ended(result, [(self._used, result)])
        with tempfile.NamedTemporaryFile(prefix="gradcomp-saves-") as saves:
            while True:
                saved = self._run_noting(saves.name)
                try:
                    end = self._after(saved, saves.name)
                except KeyboardInterrupt:  # while hosts are surveyed
                    self._tell("no restart: stopped by SIGINT.")
                    end = self._runs[-1][1]
                if end is not None:
                    return Ended(end, self._runs)

    def _left(self) -> float | None:
        """Returns the seconds until the time limit, if there is one."""
        if self._limits.timeout is None:
            return None
        return max(0.0, self._limits.timeout - (time.monotonic() - self._started))

    def _run_noting(self, saves: str) -> bool:
        """Runs the job once; returns whether it has saved."""
        saved = os.stat(saves).st_size
        noting = {SAVES: saves, **({SAVED: "1"} if saved else {})}
        result = self._run_once(self._used, self._places, self._left(), noting)
        if result.timed_out is not None:
            result = dataclasses.replace(result, timed_out=self._limits.timeout)
        self._runs.append((self._used, result))
        return os.stat(saves).st_size > saved

    def _after(self, saved: bool, saves: str) -> JobResult | None:
        """Returns the end to report after a run, or prepares the next run."""
        used, result = self._runs[-1]
        if result.regrouped:
            if saved:
                self._slots.forgive(used)
            return None if self._can_go_on("") else result
        if not _died(result):
            return result
        self._restarts += 1
        left_out, first = None, None
        if saved:
            self._slots.forgive(used)
        else:
            left_out, first = self._slots.blame(result, used)
        if first is not None:
            self._tell("two runs died without a save between them, so another run would die, too.")
            return first
        if self._restarts > self._limits.restarts:
            self._tell(f"--max-restarts allows only {self._limits.restarts}.")
            return result
        if self._tells:
            report_end(result, shown_tails=self._shown_tails)
        if left_out is not None:
            self._tell(
                f"slot {left_out} is left out until the other workers have saved: its worker died "
                "first in two runs, without a save between them."
            )
        nothing = "" if os.stat(saves).st_size else ", from zero: nothing has been saved"
        return None if self._can_go_on(nothing) else result

    def _can_go_on(self, nothing: str) -> bool:
        """Chooses the slots of the next run; returns whether they are enough."""
        before, least = self._used, self._slots.least
        self._used, problems = self._find_slots()
        for problem in problems:
            self._tell(f"no worker can be started on {problem}")
        count = f"{len(self._used)} of {self._slots.number} workers"
        if len(self._used) < least and not self._wait_for_slots():
            self._tell(f"no restart: {count} could start, and the job needs {least}.")
            return False
        count = f"{len(self._used)} of {self._slots.number} workers"
        slots = f"slot{'s' if len(self._used) > 1 else ''} {', '.join(map(str, self._used))}"
        where = f", with {count}, in {slots}" if list(before) != self._used else ""
        what = f"restart {self._restarts} of {self._limits.restarts}"
        if self._runs[-1][1].regrouped:
            what = "start again, which does not count as a restart"
        self._tell(f"{what}{where}{nothing}.")
        return True

    def _find_slots(self) -> tuple[Sequence[int], Sequence[str]]:
        """Returns the slots that could be used now, and the problems of places without any."""
        if self._survey is None:
            return self._slots.usable(range(self._slots.number), self._used), ()
        self._places = self._survey()
        return self._slots.usable(self._places.slots, self._used), self._places.problems

    def _wait_for_slots(self) -> bool:
        """Waits until there are enough slots; returns whether there are."""
        left = self._left()
        wait = self._limits.wait if left is None else min(self._limits.wait, left)
        until = time.monotonic() + wait
        if wait:
            self._tell(f"waits up to {wait:g} s for {self._slots.least} workers.")
        while len(self._used) < self._slots.least and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN)
            self._used, _ = self._find_slots()
        return len(self._used) >= self._slots.least

    def _tell(self, notice: str) -> None:
        if self._tells:
            click.secho(f"gradcomp: {notice}", err=True, fg="yellow")


def check_restarts(workers: int, most: int, least: int | None) -> None:
    """Refuses a `--min-workers` that means nothing."""
    if least is None:
        return
    if not most:
        raise click.UsageError(
            "--min-workers says with how many workers the job may be started again: give "
            "--max-restarts, too."
        )
    if least > workers:
        raise click.UsageError(
            f"--min-workers {least} is more than the {workers} of the job; expected at most "
            f"{workers}."
        )


def _died(result: JobResult) -> bool:
    by_user = result.stop_signal is not None or result.timed_out is not None
    return result.first_failure is not None and not by_user
