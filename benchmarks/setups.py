"""Setups of the network benchmark, with the baselines that methods have to beat."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jobs
import network_report
from network_rows import Record, grouped

# Dense steps of all frameworks. Horovod and PyTorch overlap the exchange with the backward pass.
DENSE = (*jobs.DENSE.values(), "no_compression")
CASTS = (jobs.FLOAT16, "cast", jobs.HOROVOD_FLOAT16, jobs.TORCH_FLOAT16)


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
        return [name for name in self.records if name not in (*DENSE, *CASTS, jobs.NOTHING)]

    @property
    def dense(self) -> float:
        """Seconds of the fastest dense step."""
        return min(self.seconds(name) for name in DENSE if name in self.records)

    @property
    def compute(self) -> float:
        """Seconds of a step that communicates nothing."""
        return self.seconds(jobs.NOTHING)

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


def ring_bytes(workers: int, given: float) -> float:
    """Returns the bytes that each worker sends in a ring all-reduce of `size` bytes."""
    return 2 * (workers - 1) / workers * given


def setups(measured: Mapping[str, Any]) -> list[Setup]:
    """Returns the setups that have a dense step, in the order in which they were measured."""
    speeds = network_report.speeds(measured)
    found = []
    tables = grouped(measured["records"], "job", "workers", "link")
    for (job, workers, link), records in tables.items():
        by_name = {record["contender"]: record for record in records}
        if "no_compression" in by_name and jobs.NOTHING in by_name:
            found.append(Setup(job, workers, link, speeds[workers, link], by_name))
    return found
