"""The trainings of local_steps_accuracy.py: which there are, how one is done, and their tables."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import simulated
from output import spread, table, times
from pool import Work
from records import Record, rounded
from simulated import WORKLOADS, Training
from trainings import Task

from tf_gradcomp.cli.simulate import OUTER

DENSE = "dense"  # name of the training that the others are compared with
WITHIN = 0.01
_KIND = ("task", "dense_steps", "learners", "training")
_SETTINGS = ("inner", "steps", "outer", "compressor", "warmup_steps", "batch", "rate")
INNER = ("adam", "muon")

COMPRESSORS = {
    "none": simulated.DENSE,
    "adacomp": "adacomp",
    "top-k": "top_k(density=0.05, value_bits=2, chunk=128)",
    "top-k-0.04": "top_k(density=0.04, value_bits=2, chunk=128)",
    "qsgd-2": "qsgd(bits=2)",
    "scalecom": "scalecom",
}
# Settings of `gc.LocalSteps` at the end of a round. The last ones are SparseLoCo's.
ENDS = {
    **{name: {"outer": outer} for name, outer in OUTER.items()},
    "decay": {"outer": None, "residual_decay": 0.95},
}
# The steps of dense training, in whole rounds of all lengths; and between two evaluations.
STEPS = {
    "digits": (704, 64),
    "mnist": (320, 192),
    "shakespeare": (640, 128),
    "python-small": (960, 192),
    "transformer": (448, 128),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        task: Name of the workload.
        learners: The number of learners; 1 for dense training, which is equal for all numbers.
        seed: Seed of the weights and the order of the rows.
        dense_steps: The number of steps on batches of the task's own size.
        steps: The number of steps in a round; 1 for dense training.
        outer: A key of `ENDS`.
        compressor: A key of `COMPRESSORS`.
        warmup_steps: The number of synchronous steps before the first round.
        batch: How many times the batch is larger than the task's.
        rate: How many times the learning rate is.
        inner: The inner optimizer, which is dense training's, too: one of `INNER`.
    """

    task: str
    learners: int
    seed: int
    dense_steps: int
    steps: int = 1
    outer: str = "average"
    compressor: str = "none"
    warmup_steps: int = 0
    batch: int = 1
    rate: float = 1.0
    inner: str = "adam"

    @property
    def training(self) -> str:
        """The job's name without the task, its steps, the learners and the seed."""
        rounds = [f"rounds{self.steps}", self.outer, self.compressor]
        parts = rounds if self.steps > 1 else [DENSE]
        parts += [self.inner] if self.inner != "adam" else []
        parts += [f"warmup{self.warmup_steps}"] if self.warmup_steps else []
        parts += [f"batch{self.batch}"] if self.batch > 1 else []
        parts += [f"rate{self.rate:g}"] if self.rate != 1 else []
        return "-".join(parts)

    @property
    def name(self) -> str:
        """The name of the job, and of its record."""
        task = f"{self.task}-{self.dense_steps}steps-{self.learners}learners"
        return f"{task}-{self.training}-seed{self.seed}"

    @property
    def whole(self) -> Training:
        """The training, but for the local steps: on as many samples as the dense steps have."""
        return Training(
            self.task,
            self.learners,
            self.seed,
            self.dense_steps // self.batch,
            COMPRESSORS[self.compressor],
            self.inner,
            batch_size=self.batch * WORKLOADS[self.task].reading.batch_size,
            rate=self.rate,
        )


@dataclasses.dataclass(frozen=True)
class Grid:
    """The values of which each combination is a job: see the attributes of `Job`."""

    rounds: Sequence[int]
    compressors: Sequence[str]
    warmups: Sequence[int]
    rates: Sequence[float]
    inner: str = "adam"

    def jobs(self, learners: int, task: str, seed: int, dense_steps: int) -> Iterator[Job]:
        """Yields dense training, that with local steps, and dense training on larger batches."""
        dense = Job(task, 1, seed, dense_steps, inner=self.inner)
        for rate in dict.fromkeys((1.0, *self.rates)):
            yield dataclasses.replace(dense, rate=rate)
        for steps, *options, rate in itertools.product(
            self.rounds, ENDS, self.compressors, self.warmups, self.rates
        ):
            yield Job(
                task, learners, seed, dense_steps, steps, *options, rate=rate, inner=self.inner
            )
        for factor in self.rounds:
            for rate in (1.0, math.sqrt(factor)):
                yield dataclasses.replace(dense, batch=factor, rate=rate)


def _measure(job: Job) -> Record:
    """Trains; returns the record."""
    local = {"steps": job.steps, "warmup_steps": job.warmup_steps, **ENDS[job.outer]}
    every = max(1, STEPS[job.task][1] // job.batch)
    record = simulated.train(job.whole, every, local if job.steps > 1 else None)
    del record["traffic"]  # by variable: no table has it
    return {**dataclasses.asdict(job), "training": job.training, **rounded(record)}


def _seconds(job: Job) -> float:
    return simulated.expected_seconds(job.whole)


WORK = Work(_measure, _seconds, simulated.WORK.summary)


def fewer_bytes(record: Record) -> tuple[float, float]:
    """Returns how many times fewer bytes a step of dense training's batch gives, and sends."""
    if record["steps"] == 1:  # dense
        return record["batch"], record["batch"]
    dense, workers = record["dense_bytes"], record["learners"]
    ring = 2 * (workers - 1) / workers * dense
    return dense / record["payload_bytes"], ring / record["sent_bytes"]


def compare(records: Sequence[Record], readings: Mapping[str, Task]) -> list[Record]:
    """A row for each training: means over the seeds that dense training has, too.

    Each seed is compared with dense training by the same inner optimizer, at its best learning
    rate: the rate with the best mean over all seeds that dense training has at any rate.

    Args:
        records: Those of all runs.
        readings: How to read the quality, by task; rows have the tasks in this order.
    """
    dense = _best_dense(records, readings)
    kinds: dict[tuple, list[Record]] = {}
    for record in sorted(records, key=lambda one: _sort_key(one, list(readings))):
        if _of_seed(record) in dense:
            kinds.setdefault(tuple(record[key] for key in _KIND), []).append(record)
    rows = []
    for same in kinds.values():
        qualities = [record["quality"] for record in same]
        quality = statistics.mean(qualities)
        goals = {inner: _mean_goal(same, dense, inner) for inner in INNER}
        goal = goals[same[0]["inner"]]
        rises = readings[same[0]["task"]].rises
        good = quality >= (1 - WITHIN) * goal if rises else quality <= (1 + WITHIN) * goal
        given, sent = (statistics.mean(one) for one in zip(*map(fewer_bytes, same), strict=True))
        rows.append(
            {
                **{key: same[0][key] for key in (*_KIND, *_SETTINGS)},
                "seeds": len(same),
                "qualities": qualities,
                "quality": quality,
                "goals": goals,
                "difference": quality - goal,
                "good": good,
                "bytes": same[0]["dense_bytes"] / given,
                "times fewer": given,
                "times fewer sent": sent,
            }
        )
    return rows


def _best_dense(records: Sequence[Record], readings: Mapping[str, Task]) -> dict[tuple, float]:
    """Returns the quality of dense training at its best rate, by what `_of_seed` returns."""
    rates: dict[tuple, dict[float, dict[tuple, float]]] = {}
    for record in records:
        if record["steps"] == 1 and record["batch"] == 1:
            rates_of_task = rates.setdefault(_of_seed(record)[:-1], {})
            rates_of_task.setdefault(record["rate"], {})[_of_seed(record)] = record["quality"]
    best: dict[tuple, float] = {}
    for (task, *_), rates_of_task in rates.items():
        seeds = max(map(len, rates_of_task.values()))
        complete = [qualities for qualities in rates_of_task.values() if len(qualities) == seeds]
        sign = 1 if readings[task].rises else -1
        best |= max(complete, key=lambda qualities: sign * statistics.mean(qualities.values()))
    return best


def _mean_goal(same: Sequence[Record], dense: Mapping[tuple, float], inner: str) -> float | None:
    """The mean quality of the best dense training by an optimizer, on the seeds of some records."""
    goals = [dense.get(_of_seed({**record, "inner": inner})) for record in same]
    return None if None in goals else statistics.mean(goals)


def _of_seed(record: Record) -> tuple:
    return record["task"], record["dense_steps"], record["inner"], record["seed"]


def _sort_key(record: Record, tasks: Sequence[str]) -> tuple:
    """Returns a key that sorts records: dense training first, and rounds by their lengths."""
    first = tasks.index(record["task"]), record["dense_steps"], record["learners"]
    return *first, *(record[key] for key in _SETTINGS), record["seed"]


def markdown(rows: Sequence[Record], readings: Mapping[str, Task]) -> str:
    """The tables: the longest rounds that are good enough, and all trainings of each task."""
    parts = [f"**The longest rounds within 1 % of uncompressed training**\n\n{longest(rows)}"]
    for task, steps in dict.fromkeys(map(_run_length, rows)):
        task_rows = [row for row in rows if _run_length(row) == (task, steps)]
        parts.append(f"**{_with_steps(task, steps)}**\n\n{_table(task_rows, readings[task])}")
    return "\n".join(parts)


def several_seeds(rows: Sequence[Record], readings: Mapping[str, Task], seeds: int = 3) -> str:
    """The table of the rounds that were trained with enough seeds."""
    body = []
    for row in rows:
        if row["steps"] > 1 and row["seeds"] >= seeds:
            sign = -1 if readings[row["task"]].rises else 1
            behind = sign * row["difference"] / (row["quality"] - row["difference"])
            cells = [_with_steps(*_run_length(row)), str(row["learners"]), _named(row)]
            body.append([*cells, f"{100 * behind:+.1f}", times(row["times fewer sent"])])
    head = ["task", "workers", "training", "% behind uncompressed", "times fewer bytes sent"]
    return "\n".join(table(head, body))


def by_inner_optimizer(rows: Sequence[Record], readings: Mapping[str, Task]) -> str:
    """The table of all training by Muon, and of the same training by Adam."""
    by_muon = [row for row in rows if row["inner"] == "muon"]
    tried = dict.fromkeys(map(_run_length, by_muon))
    rounds = {_rounds(row) for row in by_muon}
    body = []
    for place in tried:
        there = [row for row in rows if _run_length(row) == place and row["batch"] == 1]
        reading = readings[place[0]]
        for row in there:
            if row["steps"] > 1 and _rounds(row) not in rounds:
                continue
            many = str(row["learners"]) if row["steps"] > 1 else "any"
            cells = [_with_steps(*place), many, _named(row), str(row["seeds"])]
            cells += [spread(row["qualities"], reading.digits)]
            cells += [_behind(row["quality"], row["goals"][inner], reading) for inner in INNER]
            body.append([*cells, times(row["times fewer sent"]) if row["steps"] > 1 else "1"])
    behind = [f"% behind {inner.capitalize()}, uncompressed" for inner in INNER]
    head = ["task", "workers", "training", "seeds", "quality", *behind, "times fewer bytes sent"]
    return "\n".join(table(head, body))


def _run_length(row: Record) -> tuple[str, int]:
    return row["task"], row["dense_steps"]


def _with_steps(task: str, steps: int) -> str:
    return f"{task}, {steps:,} steps"


def _rounds(row: Record) -> tuple[str | int, ...]:
    """Returns all but the optimizer and its rate."""
    keys = ("steps", "outer", "compressor", "warmup_steps")
    return (*_setup(row), *(row[key] for key in keys))


def _behind(quality: float, best: float | None, reading: Task) -> str:
    """Returns by how many percent a quality is worse than the best one."""
    if best is None:
        return ""
    return f"{(-100 if reading.rises else 100) * (quality - best) / best:+z.1f}"


def _named(row: Record) -> str:
    """Returns a training in words."""
    parts = [DENSE]
    if row["steps"] > 1:
        outer = {"average": "mean", "decay": "mean, decay"}.get(row["outer"], "Nesterov")
        compressor = "uncompressed" if row["compressor"] == "none" else row["compressor"]
        parts = [f"rounds of {row['steps']}", outer, compressor]
    parts += ["Muon"] if row["inner"] == "muon" else []
    parts += [f"{row['warmup_steps']} steps of warm-up"] if row["warmup_steps"] else []
    parts += [f"batches {row['batch']} times larger"] if row["batch"] > 1 else []
    parts += [f"rate {row['rate']:.3g} times"] if row["rate"] != 1 else []
    return ", ".join(parts)


def _table(rows: Sequence[Record], reading: Task) -> str:
    head = [
        *("learners", "training", "seeds", reading.label, "from best dense", "within 1 %"),
        *("bytes a step", "times fewer", "times fewer sent"),
    ]
    body = [
        [
            str(row["learners"]) if row["steps"] > 1 else "any",
            _named(row),
            str(row["seeds"]),
            spread(row["qualities"], reading.digits),
            f"{row['difference']:+.{reading.digits}f}",
            "yes" if row["good"] else "no",
            *(f"{row[key]:,.0f}" for key in ("bytes", "times fewer", "times fewer sent")),
        ]
        for row in rows
    ]
    return "\n".join(table(head, body)) + "\n"


def longest(rows: Sequence[Record]) -> str:
    local = [row for row in rows if row["steps"] > 1]
    compressors = list(dict.fromkeys(row["compressor"] for row in local))
    body = []
    for place in dict.fromkeys(_setup(row) for row in local):
        place_rows = [row for row in local if _setup(row) == place]
        task, steps, learners = place
        larger = [row for row in rows if row["batch"] > 1 and _setup(row) == (task, steps, 1)]
        body.append(
            [
                _with_steps(task, steps),
                str(learners),
                *(
                    _most([r for r in place_rows if r["compressor"] == c], "steps")
                    for c in compressors
                ),
                _most(larger, "batch"),
            ]
        )
    columns = [f"steps, {'uncompressed' if name == 'none' else name}" for name in compressors]
    head = ["task", "workers", *columns, "larger batch"]
    return "\n".join(table(head, body)) + "\n"


def _setup(row: Record) -> tuple[str, int, int]:
    return row["task"], row["dense_steps"], row["learners"]


def _most(rows: Sequence[Record], key: str) -> str:
    """Returns the largest value of rows that are good enough, of all rows."""
    good = [row[key] for row in rows if row["good"]]
    return str(max(good)) if good else "none" if rows else ""
