"""Measures what a fault of a worker costs a job that is restarted.

    python benchmarks/faults.py restart      # kills workers, and splits the time to the next step
    python benchmarks/faults.py pause        # stops a worker for 20 s, and cuts its link for 10 s
    python benchmarks/faults.py kept         # kills a worker every two minutes, and counts steps
    python benchmarks/publish.py             # writes the page from the records

Two workers train by `marked.py`, which saves and resumes, under `gradcomp run --max-restarts`.
Results go to `records/faults.jsonl`, in the place of earlier results of the same kind and training.
The cut of a link needs root: `links.py` makes the links.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import fault_jobs
import faults_report as report
import links
import records
from fault_jobs import EPOCH, TASKS, JobEndedError, Task, Watch, running
from output import processor, show
from records import Record, rounded
from rich.console import Console

STOP, CUT = "stopped for 20 s", "link cut for 10 s"
SECONDS = {STOP: 20.0, CUT: 10.0}
_VICTIM = 1
_LONGEST = 600.0  # seconds that a start, or the steps between two saves, may take
_SETTLED = 10.0  # seconds of training after a pause
_WARM = 5  # the first steps of a start, which are slower


def _last(watch: Watch, fact: str, since: float = 0.0) -> Any:
    """Returns the last line of worker 0 with a fact since a time, if there is one."""
    for line in reversed(watch.log.lines):
        if fact in line and line["worker"] == 0:
            return line if line["at"] >= since else None
    return None


def _trained(watch: Watch, since: float, count: int) -> bool:
    """Returns whether the workers that have started since a time have taken so many steps."""
    first = report.first_steps(watch.log.lines, since)
    last = _last(watch, "step", since)
    return len(first) == fault_jobs.WORKERS and last["step"] - first[0]["step"] >= count


def _kill(watch: Watch) -> float:
    """Kills a worker; returns when."""
    killed = time.monotonic()
    os.kill(watch.log.pids[_VICTIM], signal.SIGKILL)
    return killed


def _wait_for_restart(watch: Watch, killed: float) -> float:
    """Waits for the next step of all workers; returns the seconds since the kill."""
    watch.wait(lambda: _trained(watch, killed, 0), _LONGEST)
    steps = report.first_steps(watch.log.lines, killed)
    return max(line["at"] for line in steps.values()) - killed


def measure_restarts(task: Task, kills: int) -> Record:
    """Kills a worker some times, each time halfway between two saves."""
    interval = task.often
    found: list[dict[str, float]] = []
    lost: list[int] = []
    paces: list[report.Pace] = []
    with running(task, str(interval)) as watch:
        since = time.monotonic()
        for _ in range(kills):
            watch.sleep(since + task.unprepared - time.monotonic())
            watch.wait(_halfway(watch, since, interval), _LONGEST)
            paces.append(report.pace(_undisturbed(watch, since)))
            since = _kill(watch)
            _wait_for_restart(watch, since)
            found.append(report.parts(watch.log.lines, watch.job.said, since))
            lost.append(report.lost_steps(watch.log.lines, since))
    return {
        "kind": report.RESTART,
        "parts": {part: statistics.mean(split[part] for split in found) for part in report.PARTS},
        "seconds": [sum(split.values()) for split in found],
        "lost": lost,
        "step": statistics.median(pace.step for pace in paces),
        "save": statistics.median(pace.save for pace in paces),
        "epoch": task.epoch,
        "often": interval,
    }


def _halfway(watch: Watch, since: float, interval: int) -> Callable[[], bool]:
    """Returns a condition: a save, and half of the steps to the next one."""

    def condition() -> bool:
        saved, step = (_last(watch, fact, since) for fact in ("saved", "step"))
        if not saved or not _trained(watch, since, _WARM):
            return False
        return 0 <= step["step"] - saved["saved"] - interval // 2 < _WARM

    return condition


def _undisturbed(watch: Watch, since: float) -> list[dict[str, Any]]:
    """Returns the lines since a start, without its first steps."""
    first = report.first_steps(watch.log.lines, since)[0]
    warm = first["step"] + _WARM
    return [
        line
        for line in watch.log.lines
        if line["at"] >= first["at"] and line.get("step", warm) >= warm
    ]


def measure_pause(task: Task, fault: str) -> Record:
    """Pauses a worker, or cuts its link."""
    if fault == STOP:
        with running(task, EPOCH) as watch:
            return _paused(
                watch,
                fault,
                lambda: os.kill(watch.log.pids[_VICTIM], signal.SIGSTOP),
                lambda: os.kill(watch.log.pids[_VICTIM], signal.SIGCONT),
            )
    with (
        links.network(fault_jobs.WORKERS) as network,
        running(task, EPOCH, network) as watch,
    ):
        return _paused(watch, fault, lambda: network.cut(_VICTIM), lambda: network.rejoin(_VICTIM))


def _paused(watch: Watch, fault: str, begin: Callable[[], None], end: Callable[[], None]) -> Record:
    watch.wait(lambda: _trained(watch, 0.0, 4 * _WARM), _LONGEST)
    undisturbed = _undisturbed(watch, 0.0)
    began = time.monotonic()
    begin()
    try:
        watch.sleep(SECONDS[fault])
    finally:
        end()
    ended = time.monotonic()

    def trains_on() -> bool:
        step = _last(watch, "step", ended)
        return bool(step) and step["at"] >= _first_after(watch, ended) + _SETTLED

    watch.wait(trains_on, _LONGEST)
    steps = [line for line in undisturbed if "step" in line and line["worker"] == 0]
    return {
        "kind": report.PAUSE,
        "fault": fault,
        "outage": report.longest_gap(watch.log.lines, _VICTIM, began),
        "restarts": len(report.starts(watch.log.lines, began)) // fault_jobs.WORKERS,
        "step": (steps[-1]["at"] - steps[0]["at"]) / (len(steps) - 1),
    }


def _first_after(watch: Watch, since: float) -> float:
    return next(
        (
            line["at"]
            for line in watch.log.lines
            if "step" in line and line["worker"] == 0 and line["at"] >= since
        ),
        float("inf"),
    )


def measure_kept(task: Task, saves: str, every: float, kills: int) -> Record:
    """Trains for a period without kills and then for some periods that begin with a kill."""
    outages, lost = [], []
    period = 60 * every
    with running(task, saves) as watch:
        watch.wait(lambda: _trained(watch, 0.0, task.epoch + _WARM), _LONGEST)  # it has evaluated
        began = time.monotonic()
        watch.sleep(period)
        pace = report.pace(line for line in watch.log.lines if line["at"] >= began)
        began = time.monotonic()
        before = _last(watch, "step")["step"]
        for index in range(kills):
            killed = _kill(watch)
            outages.append(_wait_for_restart(watch, killed))
            lost.append(report.lost_steps(watch.log.lines, killed))
            watch.sleep(began + (index + 1) * period - time.monotonic())
        seconds = time.monotonic() - began
        kept = _last(watch, "step")["step"] - before
    return {
        "kind": report.KEPT,
        "interval": task.interval(saves),
        "every": every,
        "kills": kills,
        "share": kept * pace.step / seconds,
        "seconds": outages,
        "lost": lost,
        "step": pace.step,
        "save": pace.save,
    }


def _record(name: str, task: str, measure: Callable[[], Record]) -> None:
    """Measures, records and shows the result.

    Raises:
        click.ClickException: If a job has ended, or takes too long.
    """
    try:
        measured = measure()
    except JobEndedError as error:
        raise click.ClickException(f"{name}: {error}") from error
    record = {"task": task, **rounded(measured), "machine": processor()}
    recorded = {**records.by_name(records.FAULTS), name: record}
    records.write_by_name(records.FAULTS, recorded)
    of_task = [record for record in recorded.values() if record["task"] == task]
    show(Console(), report.markdown(of_task), [records.FAULTS])


def _task_option(*default: str) -> Callable[[Any], Any]:
    return click.option(
        "--task",
        "tasks",
        type=click.Choice(list(TASKS)),
        multiple=True,
        default=default,
        show_default=True,
        help="What is trained; repeat it for several.",
    )


@click.group(help=__doc__)
def main() -> None:
    signal.signal(signal.SIGTERM, lambda signum, _frame: sys.exit(128 + signum))  # cleans up


@main.command()
@_task_option(*TASKS)
@click.option("--kills", type=click.IntRange(min=1), default=3, show_default=True)
def restart(tasks: Sequence[str], kills: int) -> None:
    """Kill a worker, and split the time until all workers train again."""
    for task in tasks:
        _record(f"restart: {task}", task, lambda task=task: measure_restarts(TASKS[task], kills))


@main.command()
@_task_option("digits", "transformer")
@click.option(
    "--fault",
    "faults",
    type=click.Choice(list(SECONDS)),
    multiple=True,
    default=list(SECONDS),
    show_default=True,
)
def pause(tasks: Sequence[str], faults: Sequence[str]) -> None:
    """Stop a worker by SIGSTOP, and cut its link."""
    for task in tasks:
        for fault in faults:
            if fault == CUT and (why_not := links.missing()):
                click.secho(f"{fault}: not measured. {why_not}", err=True, fg="yellow")
                continue
            _record(
                f"{fault}: {task}",
                task,
                lambda task=task, fault=fault: measure_pause(TASKS[task], fault),
            )


@main.command()
@_task_option("digits", "transformer")
@click.option(
    "--saves",
    type=click.Choice([EPOCH, "steps"]),
    default=EPOCH,
    show_default=True,
    help="Save after each epoch, or more often.",
)
@click.option("--every", type=float, default=2.0, show_default=True, help="Minutes between kills.")
@click.option("--minutes", type=float, default=6.0, show_default=True, help="The minutes in all.")
def kept(tasks: Sequence[str], saves: str, every: float, minutes: float) -> None:
    """Count the steps that a job keeps whose workers are killed.

    The first of the periods between two kills is without one, and is what the others are compared
    with.
    """
    kills = round(minutes / every) - 1
    if kills < 1:
        raise click.UsageError("There is no kill: --minutes is to be twice --every at least.")
    for name in tasks:
        task = TASKS[name]
        chosen = EPOCH if saves == EPOCH else str(task.often)
        _record(
            f"kept: {name}, {task.interval(chosen)} steps, {every:g} minutes",
            name,
            lambda task=task, chosen=chosen: measure_kept(task, chosen, every, kills),
        )


if __name__ == "__main__":
    main()
