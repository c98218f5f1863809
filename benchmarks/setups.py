"""Setups of the network benchmark: the baselines to beat, and a model of a step's time.

The model is fitted on some setups, and tested on others:

    step = computing + a + e * weights * workers / 2 + sent bytes / speed of the link

For each method, `a` is the latency of its collectives, and `e` is the time of encoding, decoding
and copying for each weight. All workers share two cores, so the latter time grows with their
number. `gc.advise` has the same cost model. There, each part is measured in the job itself.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import turns
from network_report import grouped, speeds
from records import Record
from turns import AUTO

from tf_gradcomp.advice.cost_model import Curve, Kind, Prediction, SentRequest, Work, predict

# Dense steps of all frameworks. Horovod and PyTorch overlap the exchange with the backward pass.
DENSE = (*turns.DENSE.values(), "no_compression")
CLOSE = 0.2
_KIND = Kind("any", "bytes")
CASTS = (turns.FLOAT16, "cast", turns.HOROVOD_FLOAT16, turns.TORCH_FLOAT16)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The measurements of a job with a number of workers on a link.

    Attributes:
        job: The job.
        workers: Number of workers.
        link: Name of the link.
        speed: Measured speed of the link, in Mbit/s.
        records: The record of each contender, by name.
    """

    job: str
    workers: int
    link: str
    speed: float
    records: Mapping[str, Record]

    def seconds(self, name: str) -> float:
        """Returns the median time of a contender's step."""
        return statistics.median(self.records[name]["seconds"])

    def fastest(self, names: Sequence[str]) -> str | None:
        """Returns the fastest of some contenders; None if none of them was measured."""
        there = [name for name in names if name in self.records]
        return min(there, key=self.seconds, default=None)

    @property
    def methods(self) -> list[str]:
        """Returns all contenders except the baselines and the step without communication."""
        return [name for name in self.records if name not in (*DENSE, *CASTS, turns.NOTHING)]

    @property
    def dense(self) -> float:
        """Seconds of the fastest dense step."""
        return min(self.seconds(name) for name in DENSE if name in self.records)

    @property
    def compute(self) -> float:
        """Seconds of a step that communicates nothing."""
        return self.seconds(turns.NOTHING)

    @property
    def dense_bytes(self) -> float:
        """Bytes that a worker sends in a dense step."""
        return self.records["no_compression"]["counted_bytes"]

    @property
    def weights(self) -> float:
        """Number of weights of the model."""
        return self.dense_bytes / ring_bytes(self.workers, 4)

    @property
    def fully_used(self) -> float:
        """Seconds of a dense step with the best possible overlap, at the link's full speed."""
        return max(self.compute, 8 * self.dense_bytes / (1e6 * self.speed))


def ring_bytes(workers: int, size: float) -> float:
    """Returns the bytes that each worker sends in a ring all-reduce of `size` bytes."""
    return 2 * (workers - 1) / workers * size


def setups(measured: Mapping[str, Any]) -> list[Setup]:
    """Returns the setups that have a dense step, in the order in which they were measured."""
    raw = speeds(measured)
    found = []
    tables = grouped(measured["records"], "job", "workers", "link")
    for (job, workers, link), records in tables.items():
        by_name = {record["contender"]: record for record in records}
        if "no_compression" in by_name and turns.NOTHING in by_name:
            found.append(Setup(job, workers, link, raw[workers, link], by_name))
    return found


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a method's exchange, without the time on the link.

    Attributes:
        latency: Seconds that do not depend on the model.
        each: Seconds per weight.
    """

    latency: float
    each: float

    def step(
        self, method: str, compute: float, weights: float, sent_bytes: float, speed: float
    ) -> Prediction:
        """Predicts a step.

        Args:
            method: Name of the method.
            compute: Seconds of a step that exchanges nothing.
            weights: Number of weights, times the workers for each two cores.
            sent_bytes: Bytes that a worker sends in a step.
            speed: Mbit/s of the link.
        """
        per_byte = 8 / (1e6 * speed)
        curve = Curve([(0.0, self.latency), (1.0, self.latency + per_byte)])
        work = Work(self.each * weights, 0.0, sent_bytes, [SentRequest(_KIND, sent_bytes)])
        return predict(method, work, {_KIND: curve}, compute)


def fit(name: str, setups: Sequence[Setup]) -> Cost | None:
    """Fits a method's cost to the setups that have it; None if fewer than two do.

    The fit minimizes relative errors, so that slow links do not dominate.
    """
    measured = [setup for setup in setups if is_known(name, setup)]
    if len(measured) < 2:
        return None
    transfer_seconds = np.array(
        [setup.seconds(name) - setup.compute - _sending(name, setup) for setup in measured]
    )
    columns = np.array([[1.0, _weights(setup)] for setup in measured])
    step_seconds = np.array([setup.seconds(name) for setup in measured])
    return Cost(*_not_negative(columns / step_seconds[:, None], transfer_seconds / step_seconds))


def is_known(name: str, setup: Setup) -> bool:
    """Returns whether a contender is one method whose computing and bytes were measured."""
    ours = turns.framework(name) == turns.TENSORFLOW_NAME and name not in (AUTO, turns.NOTHING)
    return ours and name in setup.records and setup.records[name]["counted_bytes"] is not None


def _weights(setup: Setup) -> float:
    return setup.weights * setup.workers / 2


def _sending(name: str, setup: Setup) -> float:
    return 8 * setup.records[name]["counted_bytes"] / (1e6 * setup.speed)


def _not_negative(columns: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Returns the least squares of two columns without negative factors."""
    found = np.linalg.lstsq(columns, values, rcond=None)[0]
    if (found >= 0).all():
        return float(found[0]), float(found[1])
    single_costs = [max(0.0, float(c @ values / (c @ c))) for c in columns.T]
    errors = [np.sum((c * x - values) ** 2) for c, x in zip(columns.T, single_costs, strict=True)]
    return (single_costs[0], 0.0) if errors[0] <= errors[1] else (0.0, single_costs[1])


@dataclasses.dataclass(frozen=True)
class Trial:
    """Errors of a model that was fitted on some setups and tested on others.

    Attributes:
        fitted: Description of the setups that the model was fitted on.
        tested: Description of the setups that the model was tested on.
        errors: Predicted over measured time, minus 1: for each method and setup.
    """

    fitted: str
    tested: str
    errors: Mapping[tuple[str, str], float]

    @property
    def median(self) -> float:
        """The median of the errors' sizes."""
        return statistics.median(map(abs, self.errors.values()))

    @property
    def close(self) -> int:
        """The number of errors of at most `CLOSE`."""
        return sum(abs(error) <= CLOSE for error in self.errors.values())

    @property
    def worst(self) -> tuple[tuple[str, str], float]:
        """The largest error, with its method and setup."""
        return max(self.errors.items(), key=lambda item: abs(item[1]))


def trials(setups: Sequence[Setup]) -> list[Trial]:
    """Holds out each link in turn, and then the setups of more than two workers."""
    two_worker_setups = [setup for setup in setups if setup.workers == 2]
    links = sorted(
        {setup.link: setup.speed for setup in two_worker_setups}.items(), key=lambda item: item[1]
    )
    found = [
        _trial(two_worker_setups, lambda setup, link=link: setup.link == link, f"2 workers, {link}")
        for link, _ in links
    ]
    found.append(_trial(setups, lambda setup: setup.workers > 2, "4 workers"))
    return [trial for trial in found if trial.errors]


def _trial(setups: Sequence[Setup], held_out: Callable[[Setup], bool], tested: str) -> Trial:
    fitted_setups = [setup for setup in setups if not held_out(setup)]
    fitted = ", ".join(
        dict.fromkeys(setup.link for setup in sorted(fitted_setups, key=lambda setup: setup.speed))
    )
    errors = {}
    for setup in filter(held_out, setups):
        for name in setup.records:
            cost = fit(name, fitted_setups) if is_known(name, setup) else None
            if cost:
                step = _predicted(cost, name, setup, fitted_setups)
                where = f"{setup.job}, {setup.workers} workers, {setup.link}"
                errors[name, where] = step / setup.seconds(name) - 1
    return Trial(f"2 workers, {fitted}", tested, errors)


def _predicted(cost: Cost, name: str, setup: Setup, fitted_setups: Sequence[Setup]) -> float:
    """Returns the seconds of a step, with the bytes from other links if counted there."""
    alike = [
        fitted_setup.records[name]["counted_bytes"]
        for fitted_setup in fitted_setups
        if (fitted_setup.job, fitted_setup.workers) == (setup.job, setup.workers)
        and is_known(name, fitted_setup)
    ]
    sent = statistics.mean(alike) if alike else setup.records[name]["counted_bytes"]
    return cost.step(name, setup.compute, _weights(setup), sent, setup.speed).step
