"""Runs the workers of a scheduler's tasks, so that all tasks know how all workers have ended."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import click

from tf_gradcomp.cli.job import addresses_of
from tf_gradcomp.cli.restarts import Ended, Limits, Restarts
from tf_gradcomp.environment import SAVES
from tf_gradcomp.launch import (
    LATEST,
    Addresses,
    JobResult,
    LocalJob,
    Rank,
    Slots,
    Tasks,
    WorkerEnd,
)

Watch = Callable[[LocalJob], None]
RunOwn = Callable[[Rank, Sequence[str], float | None, Mapping[str, str], Watch | None], JobResult]
"""Runs this task's worker; see `run_rank`."""
_LOST = 255  # the exit code of a worker whose end is unknown, as by ssh


@dataclasses.dataclass(frozen=True)
class Present:
    """The tasks that can run workers, and a line for each other task."""

    slots: Collection[int]
    problems: Sequence[str]


class TaskRuns:
    """Runs of a job in which each task has one slot, with the task's rank as its number.

    All tasks get the same results, and therefore decide alike about the next run.

    Args:
        place: This task's place.
        addresses: The addresses of the job.
        run_own: Runs this task's worker once.
    """

    def __init__(self, place: Rank, addresses: Addresses, run_own: RunOwn) -> None:
        self._place = place
        self._addresses = addresses.workers
        self._run_own = run_own
        try:
            self._tasks = Tasks(
                place.rank, place.size, addresses.meeting, addresses.job, wait=LATEST
            )
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error

    def survey(self) -> Present:
        """Waits for all tasks; returns those that are not lost."""
        values, lost = self._exchange(None)
        return Present(
            sorted({*values} - {*lost}), [f"rank {rank}: {lost[rank]}" for rank in sorted(lost)]
        )

    def run(
        self, slots: Sequence[int], _survey: Present, left: float | None, more: Mapping[str, str]
    ) -> JobResult:
        """Runs the job once; see `Restarts`."""
        saves, own = more[SAVES], JobResult(())
        saved = os.stat(saves).st_size
        if self._place.rank in slots:
            number = slots.index(self._place.rank)
            place = dataclasses.replace(self._place, rank=number, size=len(slots))
            addresses = [self._addresses[slot] for slot in slots]

            def watch(job: LocalJob) -> None:
                if self._tasks.failed() & {0, *slots}:  # task 0 leads, even without a worker
                    job.end_after_grace()

            own = self._run_own(place, addresses, left, more, watch)
        has_saved = os.stat(saves).st_size > saved
        values, lost = self._exchange(
            {**dataclasses.asdict(own), "has_saved": has_saved}, failed=own.exit_code != 0
        )
        if not has_saved and any(value["has_saved"] for value in values.values()):
            with open(saves, "ab") as file:  # as if it had been here
                file.write(b".")
        return _joined(slots, values, lost)

    def _exchange(
        self, value: Any, *, failed: bool = False
    ) -> tuple[Mapping[int, Any], Mapping[int, str]]:
        try:
            told = self._tasks.exchange(value, failed=failed)
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
        return told.values, told.lost


def run_task(
    place: Rank,
    run_own: RunOwn,
    slots: Slots,
    limits: Limits,
    *,
    shown_tails: bool,
) -> Ended:
    """Runs this task's worker, and runs it again with those of all tasks; see `Restarts`."""
    with addresses_of(place) as addresses:
        if not limits.restarts:
            result = run_own(place, addresses.workers, limits.timeout, {}, None)
            return Ended(result, [([place.rank], result)])
        runs = TaskRuns(place, addresses, run_own)
        tells = place.rank == 0  # the others have the same result
        limits = dataclasses.replace(limits, wait=0.0)  # a lost task does not return
        ended = Restarts(
            runs.run, slots, runs.survey, limits, shown_tails=shown_tails, tells=tells
        ).run()
        return dataclasses.replace(ended, is_told=tells)


def _joined(
    slots: Sequence[int], values: Mapping[int, dict[str, Any]], lost: Mapping[int, str]
) -> JobResult:
    """Returns the result of the job, whose parts are the values of the tasks."""
    ends = [
        WorkerEnd(**{**end, "stderr_tail": tuple(end["stderr_tail"])})
        for value in values.values()
        for end in value["ends"]
    ]
    seconds = max((end.seconds for end in ends), default=0.0)
    ends += [
        WorkerEnd(number, _LOST, seconds, stderr_tail=(f"rank {slot}: {lost[slot]}",))
        for number, slot in enumerate(slots)
        if slot not in values
    ]

    def first(name: str) -> Any:
        return next((value[name] for value in values.values() if value[name] is not None), None)

    return JobResult(tuple(ends), first("timed_out"), first("stop_signal"))
