"""The growth of the memory of processes, estimated from samples over time."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

RECORD = 1432  # bytes that TensorFlow 2.21 keeps of each collective: see docs/memory.md
_WARM_UP, _SHORTEST = 30.0, 60.0  # seconds of a process: before it is judged, and judged at least
_NEGLIGIBLE = 0.01  # growth, as a share of the memory
# A process's memory depends on its memory a minute ago, so single samples are not independent. The
# error of a slope therefore comes from the means of this number of equal parts of the time.
_PARTS = 10
_STUDENT = 2.31  # the 97.5 % quantile of Student's t with _PARTS - 2 degrees of freedom


@dataclasses.dataclass
class Samples:
    """The memory of a process over time.

    Attributes:
        kind: The process's part in the job, such as `worker 0`.
        times: When samples were taken, in seconds.
        megabytes: The anonymous memory that was resident then.
        records: The part of it that is TensorFlow's records of collectives, in megabytes.
    """

    kind: str
    times: list[float] = dataclasses.field(default_factory=list)
    megabytes: list[float] = dataclasses.field(default_factory=list)
    records: list[float] = dataclasses.field(default_factory=list)

    def part(self, since: float) -> Samples:
        """Returns the samples after a time and after the process has warmed up."""
        since = max(since, self.times[0] + _WARM_UP)
        indices = [i for i, moment in enumerate(self.times) if moment >= since]
        columns = (self.times, self.megabytes, self.records)
        kept_columns = ([values[i] for i in indices] for values in columns)
        return Samples(self.kind, *kept_columns)

    @property
    def seconds(self) -> float:
        """The time between the first sample and the last."""
        return self.times[-1] - self.times[0] if self.times else 0.0


@dataclasses.dataclass(frozen=True)
class Slope:
    """The growth of the memory of all processes with one part in the job, by least squares.

    Attributes:
        megabytes: The mean.
        records: The growth of TensorFlow's records of collectives, in megabytes per hour.
        per_hour: The slope of the rest; each process has a separate mean.
        error: Half of the width of this slope's 95 % confidence interval.
        seconds: The longest observation of one process.
    """

    megabytes: float
    records: float
    per_hour: float
    error: float
    seconds: float

    @property
    def is_flat(self) -> bool:
        """True if the slope is within its error, or the growth is negligible."""
        growth = self.per_hour * self.seconds / 3600
        return self.per_hour <= self.error or growth <= _NEGLIGIBLE * self.megabytes


def slopes(samples: Iterable[Samples], since: float) -> dict[str, Slope]:
    """Returns the growth of memory after a time, by the kind of process.

    Processes that have not lived long enough after their warm-up are left out.
    """
    kinds = collections.defaultdict(list)
    for sample in samples:
        part = sample.part(since) if sample.times else sample
        if part.seconds >= _SHORTEST:
            kinds[sample.kind].append(part)
    return {kind: _slope(parts) for kind, parts in kinds.items()}


def _slope(parts: Sequence[Samples]) -> Slope:
    part_means = [_means_of_parts(part) for part in parts]
    times = [t for part in part_means for t in _around_mean(part.times)]
    records = [r for part in part_means for r in _around_mean(part.records)]
    values = [v for part in part_means for v in _around_mean(part.megabytes)]
    spread = sum(t**2 for t in times)
    record_slope = sum(t * r for t, r in zip(times, records, strict=True)) / spread
    values = [v - r for v, r in zip(values, records, strict=True)]
    slope = sum(t * v for t, v in zip(times, values, strict=True)) / spread
    squared_error = sum((v - slope * t) ** 2 for t, v in zip(times, values, strict=True))
    error = (squared_error / (len(times) - len(parts) - 1) / spread) ** 0.5
    return Slope(
        statistics.mean(value for part in parts for value in part.megabytes),
        3600 * record_slope,
        3600 * slope,
        3600 * _STUDENT * error,
        max(part.seconds for part in parts),
    )


def _means_of_parts(samples: Samples) -> Samples:
    """Returns the means of the samples in each of `_PARTS` equally long parts of the time."""
    first, length = samples.times[0], samples.seconds
    parts = collections.defaultdict(list)
    for sample in zip(samples.times, samples.megabytes, samples.records, strict=True):
        parts[min(int(_PARTS * (sample[0] - first) / length), _PARTS - 1)].append(sample)
    means = (
        [statistics.mean(values) for values in zip(*part, strict=True)] for part in parts.values()
    )
    return Samples(samples.kind, *(list(values) for values in zip(*means, strict=True)))


def _around_mean(values: Sequence[float]) -> list[float]:
    mean = statistics.mean(values)
    return [value - mean for value in values]


def anonymous_kilobytes(pid: int | str) -> int | None:
    """Returns the anonymous memory of a process that is resident; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    sizes = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(sizes[0]) if sizes else None  # a process that has just ended has no size
