"""Lets contenders take turns on each link, in blocks of a few steps, for all frameworks."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from links import UNSHAPED, Network
from used import Used

MOST_STEPS = 20  # of a turn


@dataclasses.dataclass(frozen=True)
class Plan:
    """Measurements that the workers of a job make.

    Attributes:
        job: The name of the job in `jobs.py`.
        contenders: The names of the contenders, in order.
        links: The links to measure, in order.
        network: The network that connects the workers.
        rounds: Number of turns of each contender on each link.
        seconds: Approximate duration of a turn, which has at least one step.
        warm_up: Number of steps that fill a contender's residual before it is measured. While
            residuals are small, more is sent.
        output: File to which worker 0 writes the results.
        replicas: Number of logical CPU devices of each worker.
    """

    job: str
    contenders: Sequence[str]
    links: Sequence[str]
    network: Network
    rounds: int = 5
    seconds: float = 1.0
    warm_up: int = 100
    output: str = ""
    replicas: int = 1

    def to_text(self) -> str:
        """For the command line of a worker."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_command_line(cls) -> Plan:
        """Reads the plan of this worker from its command line."""
        plan = json.loads(sys.argv[1])
        return cls(**{**plan, "network": Network(**plan["network"])})


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to take a step.

    Attributes:
        step: Takes a step, and returns when it is done on this worker.
        prepare: Called before each step without timing, if given.
        sent_bytes: Returns the bytes that this worker has sent so far, by our own count.
        step_bytes: Replaces `sent_bytes` by constant bytes per step; both are None if not counted.
        keeps_residual: Whether the sent bytes reach their usual number only after many steps.
        renew: Recreates a contender for a link, if it depends on the link.
    """

    step: Callable[[], object]
    prepare: Callable[[], object] | None = None
    sent_bytes: Callable[[], float] | None = None
    step_bytes: float | None = None
    keeps_residual: bool = False
    renew: Callable[[], Contender] | None = None


class Timed(NamedTuple):
    """The seconds of a step, and the other resources that it used."""

    seconds: float
    used: Used


Mean = Callable[[float], float]
"""Returns the mean over all workers; all workers must call this."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A worker's connection to the others, by one framework.

    Attributes:
        rank: The index of this worker.
        mean: Averages a number over all workers.
        contender: Makes the contender of a name.
        predict: Returns the predicted seconds of exchanges on the present link, by name.
        stages: Returns the seconds of each contender's encoding and decoding, by name.
        leave: Ends the connection.
    """

    rank: int
    mean: Mean
    contender: Callable[[str], Contender]
    predict: Callable[[], Mapping[str, float]] = dict
    stages: Callable[[], Mapping[str, Mapping[str, float]]] = dict
    leave: Callable[[], object] = lambda: None


@dataclasses.dataclass
class _Turn:
    """The results of a turn: of each step, and the mean bytes that a worker sent in total."""

    steps: list[Timed]
    interface: float
    carried: float
    counted: float | None


def take_turns(
    plan: Plan,
    contenders: Mapping[str, Contender],
    mean: Mean,
    rank: int,
    predict: Callable[[], Mapping[str, float]] = dict,
) -> list[dict[str, Any]]:
    """Measures all contenders on all links; returns a record for each pair.

    Args:
        plan: The plan.
        contenders: The contenders by name.
        mean: Averages a number over the workers of the job.
        rank: This worker's rank.
        predict: Called on each link; returns the predicted seconds of exchanges, by name.
    """

    def change_to(link: str) -> None:
        mean(0.0)  # nobody sends any more
        if rank == 0:
            plan.network.shape(link)
            print(f"{plan.job}, {link}", flush=True)
        mean(0.0)

    def warm_up(contender: Contender) -> None:
        for _ in range(plan.warm_up if contender.keeps_residual else 2):
            timed(contender, mean)

    change_to(UNSHAPED)
    for contender in contenders.values():
        warm_up(contender)
    records = []
    for link in plan.links:
        change_to(link)
        predicted = predict()
        renewed = {name: one.renew() for name, one in contenders.items() if one.renew}
        if renewed:
            change_to(UNSHAPED)
            for contender in renewed.values():
                warm_up(contender)
            change_to(link)
        on_link = _on_link(plan, {**contenders, **renewed}, mean, link)
        records += [{**one, "predicted": predicted.get(one["contender"])} for one in on_link]
    return records


def timed(contender: Contender, mean: Mean) -> Timed:
    """Measures a step, from all workers' readiness to this worker's end of the step."""
    if contender.prepare:
        contender.prepare()
    mean(0.0)
    before, start = Used.now(), time.perf_counter()
    done = contender.step()
    seconds, used = time.perf_counter() - start, Used.now().since(before)
    del done  # freeing its memory is not timed
    return Timed(seconds, used)


def _on_link(
    plan: Plan, contenders: Mapping[str, Contender], mean: Mean, link: str
) -> list[dict[str, Any]]:
    steps = {name: _steps(plan, contender, mean) for name, contender in contenders.items()}
    turns: dict[str, list[_Turn]] = {name: [] for name in contenders}
    for _ in range(plan.rounds):
        for name, contender in contenders.items():
            turns[name].append(_turn(plan.network, contender, mean, steps[name]))
    place = {"job": plan.job, "workers": plan.network.workers, "link": link}
    return [{**place, "contender": name, **_summary(turns[name])} for name in contenders]


def _steps(plan: Plan, contender: Contender, mean: Mean) -> int:
    """Returns the number of steps in a turn, equal on all workers."""
    timed(contender, mean)  # TCP gets to know the link
    seconds = mean(timed(contender, mean).seconds)
    return max(1, min(MOST_STEPS, round(plan.seconds / seconds)))


def _turn(network: Network, contender: Contender, mean: Mean, steps: int) -> _Turn:
    mean(0.0)
    before = network.counters()
    counted = contender.sent_bytes() if contender.sent_bytes else None
    done = [timed(contender, mean) for _ in range(steps)]
    mean(0.0)
    sent = network.counters().since(before)
    if counted is not None:
        counted = mean(contender.sent_bytes() - counted)
    else:
        counted = steps * contender.step_bytes if contender.step_bytes is not None else None
    return _Turn(done, mean(sent.all), mean(sent.carried), counted)


def _summary(turns: Sequence[_Turn]) -> dict[str, Any]:
    steps = [step for turn in turns for step in turn.steps]
    counted = [turn.counted for turn in turns]
    return {
        "seconds": [step.seconds for step in steps],
        "page_faults": [step.used.page_faults for step in steps],
        "interface_bytes": sum(turn.interface for turn in turns) / len(steps),
        "carried_bytes": sum(turn.carried for turn in turns) / len(steps),
        "counted_bytes": None if None in counted else sum(counted) / len(steps),
    }
