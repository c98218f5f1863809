"""The arithmetic and the tables of `faults.py`.

The log's lines are those of `marked.py`. A record of `faults.py` has the `kind` of its measurement:
`restart`, `pause` or `kept`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import marked
from output import table
from records import Record

RESTART, PAUSE, KEPT = "restart", "pause", "kept"  # kinds of records
EVERY = (10, 5, 2, 1)  # minutes between two faults
# The parts of a restart, by their names in tables.
DETECTION, ENDS, FIRST_STEP = "detection", "end of the others", "trace and first step"
_STARTS = {
    "start": marked.STARTED,
    "import": marked.IMPORTED,
    "build": marked.BUILT,
    "restore": marked.RESTORED,
}
PARTS = (DETECTION, ENDS, *_STARTS, FIRST_STEP)
_STARTING = re.compile(r"gradcomp: starting \d+ workers")
_DIED = re.compile(r"gradcomp: worker \d+ died first, after ([\d.]+) s")
_RESTART = re.compile(r"gradcomp: restart \d+ of")

Line: TypeAlias = Mapping[str, Any]
Said: TypeAlias = Sequence[tuple[float, str]]


@dataclasses.dataclass(frozen=True)
class Pace:
    """The speed of training without faults.

    Attributes:
        step: Seconds of a step, without saves.
        save: Seconds of a save.
    """

    step: float
    save: float

    def with_saves(self, interval: int) -> float:
        """Returns the seconds of a step and of its share of a save.

        Args:
            interval: The steps between two saves.
        """
        return self.step + self.save / interval


def pace(lines: Iterable[Line]) -> Pace:
    """Returns the speed in undisturbed lines, of which those of worker 0 count.

    Raises:
        ValueError: If there are fewer than two steps or no save between them.
    """
    lines = [line for line in lines if line["worker"] == 0]
    steps = [line for line in lines if "step" in line]
    if len(steps) < 2:
        raise ValueError("The speed needs two steps at least.")
    first, last = steps[0], steps[-1]
    between = [line for line in lines if first["at"] < line["at"] < last["at"]]
    saves = [line["seconds"] for line in between if "saved" in line]
    if not saves:
        raise ValueError("The speed needs a save.")
    seconds = last["at"] - first["at"] - sum(saves)
    return Pace(seconds / (last["step"] - first["step"]), statistics.mean(saves))


def starts(lines: Iterable[Line], since: float) -> dict[int, float]:
    """Returns when each worker that has started since a time has first done so."""
    found: dict[int, float] = {}
    for line in lines:
        if line.get("mark") == marked.STARTED and line["at"] > since:
            found.setdefault(line["worker"], line["at"])
    return found


def first_steps(lines: Sequence[Line], since: float) -> dict[int, Line]:
    """Returns the first step of each worker that has started since a time."""
    started = starts(lines, since)
    found: dict[int, Line] = {}
    for line in lines:
        worker = line["worker"]
        if "step" in line and line["at"] > started.get(worker, float("inf")):
            found.setdefault(worker, line)
    return found


def parts(lines: Sequence[Line], said: Said, killed: float) -> dict[str, float]:
    """Splits the time from a kill to the next step of all workers; returns the seconds by part.

    A part ends when the last worker has done it. `said` has the launcher's lines with their times.
    """
    ends = {DETECTION: _noticed(said, killed), ENDS: _time_of(_RESTART, said, killed)}
    started = starts(lines, killed)
    steps = first_steps(lines, killed)
    stop = max(line["at"] for line in steps.values())
    for part, mark in _STARTS.items():
        ends[part] = max(
            line["at"]
            for line in lines
            if line.get("mark") == mark and started[line["worker"]] <= line["at"] <= stop
        )
    ends[FIRST_STEP] = stop
    begins = [killed, *ends.values()]
    return {part: end - begin for (part, end), begin in zip(ends.items(), begins, strict=False)}


def _noticed(said: Said, killed: float) -> float:
    """Returns when the launcher noticed a kill, which it gives in tenths of a second."""
    started = max(at for at, line in said if at < killed and _STARTING.search(line))
    seconds = next(
        float(found[1]) for at, line in said if at > killed and (found := _DIED.search(line))
    )
    return max(killed, started + seconds)


def _time_of(pattern: re.Pattern[str], said: Said, since: float) -> float:
    return next(at for at, line in said if at > since and pattern.search(line))


def lost_steps(lines: Sequence[Line], killed: float) -> int:
    """Returns how many steps before a kill the restarted job does not have."""
    before = max(line["step"] for line in lines if "step" in line and line["at"] <= killed)
    return before - first_steps(lines, killed)[0]["step"] + 1


def longest_gap(lines: Iterable[Line], worker: int, since: float) -> float:
    """Returns the longest time between two steps of a worker, the second of them since a time."""
    times = [line["at"] for line in lines if "step" in line and line["worker"] == worker]
    return max(end - begin for begin, end in itertools.pairwise(times) if end > since)


def share(every: float, outage: float, lost: float, pace: Pace, interval: int) -> float:
    """Returns the share of steps that a job with faults keeps, of those of a job without any.

    The job without faults does not save either.

    Args:
        every: Seconds between two faults.
        outage: Seconds without a step for each fault.
        lost: Steps that each fault discards.
        pace: The speed without faults.
        interval: Steps between two saves.
    """
    steps = (every - outage) / pace.with_saves(interval)
    if lost and steps < interval:
        return 0.0  # the job never reaches its next save
    return max(0.0, steps - lost) * pace.step / every


def restart_table(found: Iterable[Record]) -> list[str]:
    """Returns the table of the parts of restarts, in seconds."""
    rows = [
        [
            record["task"],
            *(f"{record['parts'][part]:.1f}" for part in PARTS),
            f"**{sum(record['parts'].values()):.1f}**",
            f"{min(record['seconds']):.1f} to {max(record['seconds']):.1f}",
        ]
        for record in found
        if record["kind"] == RESTART
    ]
    return table(["training", *PARTS, "all", "range of all"], rows)


def pause_table(found: Iterable[Record]) -> list[str]:
    """Returns the table of paused workers and cut links."""
    rows = [
        [
            record["task"],
            record["fault"],
            f"{record['outage']:.1f}",
            str(record["restarts"]),
            *(
                f"{share(60 * every, record['outage'], 0, _no_saves(record), 1):.0%}"
                for every in EVERY
            ),
        ]
        for record in found
        if record["kind"] == PAUSE
    ]
    return table(["training", "fault", "seconds without a step", "restarts", *_computed()], rows)


def _computed() -> list[str]:
    """Returns the heads of the columns of computed shares."""
    return [f"computed, every {every} min" for every in EVERY]


def _no_saves(record: Record) -> Pace:
    return Pace(record["step"], 0.0)


def kept_table(found: Sequence[Record]) -> list[str]:
    """Returns the table of the shares of steps that jobs with kills keep."""
    measured = {
        (record["task"], record["interval"]): record for record in found if record["kind"] == KEPT
    }
    rows = []
    for record in found:
        if record["kind"] != RESTART:
            continue
        for interval in (record["epoch"], record["often"]):
            run = measured.get((record["task"], interval))
            cells = [record["task"], str(interval)]
            cells += [f"{1000 * record['step']:.0f}", f"{record['save']:.2f}"]
            cells += [f"{computed_share(record, every, interval):.0%}" for every in EVERY]
            if measured:
                cells.append(f"{run['share']:.0%}, every {run['every']:g} min" if run else "")
            rows.append(cells)
    header = ["training", "steps between saves", "step, ms", "save, s", *_computed()]
    return table([*header, "measured"] if measured else header, rows)


def computed_share(record: Record, every: float, interval: int) -> float:
    """Returns the share of steps that a job keeps with a kill every so many minutes.

    A kill loses half of the steps between two saves on average.
    """
    pace = Pace(record["step"], record["save"])
    outage = statistics.mean(record["seconds"])
    return share(60 * every, outage, interval / 2, pace, interval)


def markdown(found: Sequence[Record]) -> str:
    """Returns all tables that have rows."""
    tables = [restart_table(found), kept_table(found), pause_table(found)]
    return "\n\n".join("\n".join(lines) for lines in tables if len(lines) > 2)
