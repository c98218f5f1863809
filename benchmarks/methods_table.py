"""The table and the plot of all methods at their defaults: their runs, and figures of records."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kernels import METHODS as TIMED
from output import spread, table
from records import Record
from simulated import DENSE, WORKLOADS, Encoding, Training
from turns import ALTERNATING

from tf_gradcomp import compressors

METHODS = [
    DENSE,
    *(name for name in compressors.names() if name not in (DENSE, compressors.Auto.name)),
    ALTERNATING,
]
LEARNERS = (2, 8, 32)
PLOTTED = "digits"  # the task
MOST_BEHIND = 10.0  # points behind dense at which the plot's axis ends


class Task(NamedTuple):
    """A task of the table.

    Attributes:
        workload: Its name.
        title: Printed name.
        level: How far behind dense training still counts as level, in the metric's unit.
        steps: The number of steps by the number of learners, of which 32 take long.
    """

    workload: str
    title: str
    level: float
    steps: Mapping[int, int]


TASKS = {
    "digits": Task("digits", "digits", 1.0, {2: 440, 8: 440, 32: 176}),
    "mnist": Task("mnist", "MNIST", 0.3, {2: 300, 8: 300, 32: 76}),
    "lstm": Task("shakespeare", "LSTM", 0.03, {2: 200, 8: 200, 32: 60}),
}


def run_of(task: str, learners: int, method: str) -> Training:
    """Returns the run of a method; dense training is that of one learner."""
    count = 1 if method == DENSE else learners
    return Training(TASKS[task].workload, count, 0, TASKS[task].steps[learners], method)


def runs_of(task: str, learners: int) -> list[Training]:
    """Returns the runs of all methods."""
    return [run_of(task, learners, method) for method in METHODS]


def encodings(learners: int) -> list[Encoding]:
    """Returns the timings of the methods that can be timed alone."""
    return [Encoding(name, learners, 0) for name in (*TIMED, ALTERNATING) if name != DENSE]


# In the order in which they run: a machine may be there for minutes only.
GROUPS: dict[str, Sequence[Training | Encoding]] = {
    "methods/digits_8": runs_of("digits", 8),
    "methods/digits_2": runs_of("digits", 2),
    "methods/encoding_8": encodings(8),
    "methods/lstm_2": runs_of("lstm", 2),
    "methods/mnist_8": runs_of("mnist", 8),
    "methods/mnist_2": runs_of("mnist", 2),
    "methods/lstm_8": runs_of("lstm", 8),
    "methods/encoding_2": encodings(2),
    "methods/digits_32": runs_of("digits", 32),
    "methods/encoding_32": encodings(32),
    "methods/mnist_32": runs_of("mnist", 32),
    "methods/lstm_32": runs_of("lstm", 32),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """The result of one method with one task and number of learners.

    Attributes:
        method: The method.
        quality: Means of the quality at the end, for each seed.
        behind: How far it is behind dense training, in the unit of the task: the mean.
        sent: The bytes that a worker sends in the whole run.
        level: How far behind is level.
    """

    method: str
    quality: Sequence[float]
    behind: float
    sent: float
    level: float

    def beats(self, competitor: Cell) -> bool:
        """Returns whether it sends less than another one, and is no further behind than noise."""
        return self.sent < competitor.sent and self.behind <= competitor.behind + self.level


def sent_in_all(record: Record, learners: int) -> float:
    """Returns the bytes that a worker sends in the whole run, in a ring."""
    if record["learners"] == 1:  # dense training, by any number of learners
        return record["steps"] * 2 * (learners - 1) / learners * record["dense_bytes"]
    return record["steps"] * record["sent_bytes"]


def cells(records: Mapping[str, Sequence[Record]], task: str, learners: int) -> dict[str, Cell]:
    """Returns what the methods reached that have records, and dense records of the same seeds.

    Args:
        records: Those of each run by its name with seed 0, one for each seed.
        task: Of `TASKS`.
        learners: The number of learners.
    """
    reading = WORKLOADS[TASKS[task].workload].reading
    dense = {
        record["seed"]: record for record in records.get(run_of(task, learners, DENSE).name, ())
    }
    found = {}
    for method in METHODS:
        method_records = records.get(run_of(task, learners, method).name, ())
        method_records = [record for record in method_records if record["seed"] in dense]
        if method_records:
            pairs = [
                (dense[record["seed"]]["quality"], record["quality"]) for record in method_records
            ]
            behind = statistics.mean(a - b if reading.rises else b - a for a, b in pairs)
            sent = statistics.mean(sent_in_all(record, learners) for record in method_records)
            quality = [record["quality"] for record in method_records]
            found[method] = Cell(method, quality, behind, sent, TASKS[task].level)
    return found


def unbeaten(found: Mapping[str, Cell]) -> list[str]:
    """Returns the methods that are level with dense training, and that no such other beats.

    There are none before all methods have been run.
    """
    if len(found) < len(METHODS):
        return []
    level = {name: cell for name, cell in found.items() if cell.behind <= cell.level}
    return [
        name
        for name, cell in level.items()
        if not any(competitor.beats(cell) for competitor in level.values())
    ]


def wins(records: Mapping[str, Sequence[Record]]) -> tuple[dict[str, int], int]:
    """Returns in how many setups each method is unbeaten, and how many setups were measured."""
    counts, setups = dict.fromkeys(METHODS, 0), 0
    for task in TASKS:
        for learners in LEARNERS:
            found = cells(records, task, learners)
            if len(found) == len(METHODS):
                setups += 1
                for method in unbeaten(found):
                    counts[method] += 1
    return counts, setups


def markdown(records: Mapping[str, Sequence[Record]], learners: int) -> str:
    """Returns the table of all methods with so many learners, as Markdown."""
    header = ["method"]
    for task in TASKS.values():
        header += [
            f"{task.title}: {WORKLOADS[task.workload].reading.label}",
            "behind dense",
            "MB sent",
        ]
    header += ["encode, ms", "decode, ms"]
    of_tasks = {name: cells(records, name, learners) for name in TASKS}
    best = {name: unbeaten(found) for name, found in of_tasks.items()}
    rows = []
    for method in METHODS:
        row = [f"`{method}`"]
        for name, found in of_tasks.items():
            row += _cells(found.get(method), TASKS[name].workload, method in best[name])
        timed = records.get(Encoding(method, learners, 0).name, [])
        for part in ("encode_ms", "decode_ms"):
            row.append(f"{statistics.mean(one[part] for one in timed):.1f}" if timed else "")
        rows.append(row)
    return "\n".join(table(header, rows)) + "\n"


def _cells(cell: Cell | None, task: str, best: bool) -> list[str]:
    if cell is None:
        return ["not run yet", "", ""]
    digits = WORKLOADS[task].reading.digits
    sent = f"{cell.sent / 1e6:,.2f}"
    return [
        spread(cell.quality, digits),
        f"{cell.behind:+.{digits}f}",
        f"**{sent}**" if best else sent,
    ]
