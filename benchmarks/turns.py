"""What the workers of all frameworks share: jobs, contenders, and their turns.

Contenders take turns on each link, in blocks of a few steps.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from links import UNSHAPED, Network

NAMES = EXCHANGE, MLP, LSTM, RESNET = "exchange", "mlp", "lstm", "resnet"

TWO_LEVELS = "two levels"  # of two_levels.py

ALL_REDUCE, FLOAT16, NOTHING = "all-reduce", "float16 all-reduce", "no communication"
AUTO = "auto"  # chooses again on each link
ALTERNATING = "power_sgd(alternate=True)"  # sends half of PowerSGD's bytes, in one collective
GOSSIP = "gossip"  # on a ring, by rank 1: see docs/gossip.md
TORCH_ALL_REDUCE = "PyTorch DDP"
TORCH_FLOAT16 = "PyTorch DDP, fp16 hook"
TORCH_POWER_SGD = "PyTorch DDP, PowerSGD hook"
TORCH = (TORCH_ALL_REDUCE, TORCH_FLOAT16, TORCH_POWER_SGD)
HOROVOD_ALL_REDUCE = "Horovod"
HOROVOD_FLOAT16 = "Horovod, fp16"
HOROVOD_ADACOMP = "Horovod, adacomp"
HOROVOD = (HOROVOD_ALL_REDUCE, HOROVOD_FLOAT16, HOROVOD_ADACOMP)
TENSORFLOW_NAME, HOROVOD_NAME, TORCH_NAME = "TensorFlow", "Horovod", "PyTorch"
BACKENDS = {  # the program of each's workers
    TENSORFLOW_NAME: "tensorflow_backend.py",
    HOROVOD_NAME: "horovod_backend.py",
    TORCH_NAME: "torch_backend.py",
}
DENSE = {  # what the others of their framework are compared with
    TENSORFLOW_NAME: ALL_REDUCE,
    HOROVOD_NAME: HOROVOD_ALL_REDUCE,
    TORCH_NAME: TORCH_ALL_REDUCE,
}

MLP_LAYERS = (784, 1024, 1024, 512, 10)
LEARNING_RATE, MOMENTUM = 0.01, 0.9
BATCHES = 64
NOISE_PLACES = 1_000_000  # where the noise of a gradient may begin: see models.py
BATCH_SIZES = {MLP: 64, LSTM: 16, RESNET: 16}  # of each worker
MOST_STEPS = 20  # of a turn


@dataclasses.dataclass(frozen=True)
class Plan:
    """Measurements that the workers of a job make.

    Attributes:
        job: The name of the job, of `NAMES`.
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


class Used(NamedTuple):
    """Resources that this process has used so far, or in between.

    Attributes:
        cpu: Seconds of CPU time.
        page_faults: Pages that the kernel mapped without reading a file.
        switches: Context switches.
    """

    cpu: float
    page_faults: int
    switches: int

    @classmethod
    def now(cls) -> Used:
        """Returns what has been used so far."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(
            usage.ru_utime + usage.ru_stime, usage.ru_minflt, usage.ru_nvcsw + usage.ru_nivcsw
        )

    def since(self, before: Used) -> Used:
        """Returns what has been used since then."""
        return Used(*(now - then for now, then in zip(self, before, strict=True)))


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


def measure(join: Callable[[Plan], Job]) -> None:
    """Makes the measurements of the plan on this worker's command line.

    Args:
        join: Connects this worker to the others.
    """
    plan = Plan.from_command_line()
    job = join(plan)
    contenders = {name: job.contender(name) for name in plan.contenders}
    records = alternate(plan, contenders, job.mean, job.rank, job.predict)
    stages = job.stages()
    if job.rank == 0:
        records = [{**record, "stages": stages.get(record["contender"])} for record in records]
        Path(plan.output).write_text(json.dumps(records))
    job.leave()


def alternate(
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
        renewed = {
            name: contender.renew() for name, contender in contenders.items() if contender.renew
        }
        if renewed:
            change_to(UNSHAPED)
            for contender in renewed.values():
                warm_up(contender)
            change_to(link)
        on_link = _on_link(plan, {**contenders, **renewed}, mean, link)
        records += [
            {**record, "predicted": predicted.get(record["contender"])} for record in on_link
        ]
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
    runs: dict[str, list[_Turn]] = {name: [] for name in contenders}
    for _ in range(plan.rounds):
        for name, contender in contenders.items():
            runs[name].append(_turn(plan.network, contender, mean, steps[name]))
    link_key = {"job": plan.job, "workers": plan.network.workers, "link": link}
    return [{**link_key, "contender": name, **_summary(runs[name])} for name in contenders]


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


def _summary(runs: Sequence[_Turn]) -> dict[str, Any]:
    steps = [step for run in runs for step in run.steps]
    counted = [run.counted for run in runs]
    return {
        "seconds": [step.seconds for step in steps],
        "page_faults": [step.used.page_faults for step in steps],
        "interface_bytes": sum(run.interface for run in runs) / len(steps),
        "carried_bytes": sum(run.carried for run in runs) / len(steps),
        "counted_bytes": None if None in counted else sum(counted) / len(steps),
    }


def framework(contender: str) -> str:
    """Returns the framework that runs a contender in separate processes, a key of `DENSE`."""
    if contender in HOROVOD:
        return HOROVOD_NAME
    return TORCH_NAME if contender in TORCH else TENSORFLOW_NAME


def images(job: str, shape: tuple[int, ...], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Batches of a worker: [batches, samples, *shape] around ten means, and which of them it is.

    The means are near each other, so that there is still something to learn when it is measured.
    """
    means = 0.1 * np.random.default_rng(0).normal(size=(10, *shape))
    random = np.random.default_rng(1 + rank)
    labels = random.integers(10, size=(BATCHES, BATCH_SIZES[job]))
    pixels = means[labels] + random.normal(size=(*labels.shape, *shape))
    return pixels.astype(np.float32), labels.astype(np.int64)


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The shapes of all weights of keras.applications.ResNet50, in some order."""

    def convolution(kernel: int, inputs: int, outputs: int) -> list[tuple[int, ...]]:
        vectors = [(outputs,)] * 3  # the bias, and the scale and offset of its normalization
        return [(kernel, kernel, inputs, outputs), *vectors]

    shapes, inputs = convolution(7, 3, 64), 64
    for blocks, filters in ((3, 64), (4, 128), (6, 256), (3, 512)):
        shapes += convolution(1, inputs, 4 * filters)
        for _ in range(blocks):
            shapes += convolution(1, inputs, filters) + convolution(3, filters, filters)
            shapes += convolution(1, filters, 4 * filters)
            inputs = 4 * filters
    return [*shapes, (inputs, 1000), (1000,)]
