"""The tables of all methods at their defaults: their runs, and figures of records."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kernels import METHODS as TIMED
from output import table, times
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
        title: Its name in tables.
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


def markdown(records: Mapping[str, Sequence[Record]], learners: int) -> list[str]:
    """The lines of a table of all methods with so many workers."""
    header = ["method"]
    for task in TASKS.values():
        unit = "points" if WORKLOADS[task.workload].reading.rises else "bits"
        header += [f"{task.title}: {unit} behind", "times fewer bytes"]
    found = {name: cells(records, name, learners) for name in TASKS}
    best = {name: unbeaten(task_cells) for name, task_cells in found.items()}
    rows = []
    for method in METHODS:
        row = [f"`{method}`"]
        for name, task_cells in found.items():
            cell = task_cells.get(method)
            row += _cells(cell, task_cells.get(DENSE), TASKS[name].workload, method in best[name])
        rows.append(row)
    return table(header, rows)


def _cells(cell: Cell | None, dense: Cell | None, task: str, best: bool) -> list[str]:
    if cell is None or dense is None:
        return ["not run yet", ""]
    fewer = times(dense.sent / cell.sent)
    return [f"{cell.behind:+.{WORKLOADS[task].reading.digits}f}", f"**{fewer}**" if best else fewer]


def fewer_bytes(records: Mapping[str, Sequence[Record]], task: str) -> list[str]:
    """The lines of a table of how many times fewer bytes each method sends, by workers."""
    found = {learners: cells(records, task, learners) for learners in LEARNERS}
    rows = [
        [f"`{method}`", *(times(each[DENSE].sent / each[method].sent) for each in found.values())]
        for method in METHODS
        if all(method in each for each in found.values())
    ]
    return table(["method", *(f"{learners} workers" for learners in LEARNERS)], rows)


def times_of_encoding(records: Mapping[str, Sequence[Record]]) -> list[str]:
    """The lines of a table of the milliseconds of encoding and decoding."""
    parts = {"encode_ms": "encode", "decode_ms": "decode"}
    header = [f"{part}, {n} workers" for part in parts.values() for n in LEARNERS]
    rows = []
    for method in METHODS:
        timed = [records.get(Encoding(method, n, 0).name, []) for n in LEARNERS]
        if all(timed):
            means = (
                statistics.mean(record[part] for record in each) for part in parts for each in timed
            )
            rows.append([f"`{method}`", *(f"{mean:.1f}" for mean in means)])
    return table(["method", *header], rows)


def named_wins(records: Mapping[str, Sequence[Record]]) -> str:
    """A sentence on the methods that are unbeaten."""
    counts, setups = wins(records)
    best = sorted(filter(counts.get, counts), key=lambda name: -counts[name])
    if not setups:
        return "No setup has been measured with all methods yet."
    named = ", ".join(f"`{name}` in {counts[name]}" for name in best)
    return f"**Bold in {setups} setups:** {named}. All other methods are bold in none."
