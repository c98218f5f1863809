"""Predicts the time of a step: computing, encoding, collectives and decoding."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

EXCHANGE_SHARE = 0.1  # the share of the time that local steps leave to the exchange
WORTHWHILE = 0.05  # of a step: predictions are not more exact


class Kind(NamedTuple):
    """A kind of request: requests of one kind differ only in their bytes."""

    request: str
    dtype: str
    same_length: bool = False


@dataclasses.dataclass(frozen=True)
class Curve:
    """The times of collectives for one kind of request, by the bytes that a worker sends.

    Between two points, the curve is linear. Beyond the last point, it extrapolates the last two: a
    latency, plus bytes divided by a bandwidth.
    """

    # Pairs of bytes and seconds, at least one, in ascending order of bytes.
    points: Sequence[tuple[float, float]]
    noise: float = 0.0  # the uncertainty of the latency in seconds

    @classmethod
    def through(cls, measured: Sequence[tuple[float, float]], noise: float = 0.0) -> Curve:
        """The curve of some measurements, corrected so that fewer bytes never take longer."""
        points: list[tuple[float, float]] = []
        least = float("inf")
        for sent_bytes, seconds in reversed(measured):
            least = min(least, seconds)
            points.insert(0, (sent_bytes, least))
        return cls(points, noise)

    def seconds(self, sent_bytes: float) -> float:
        """The seconds of collectives in which a worker sends a number of bytes."""
        if len(self.points) == 1:
            return self.points[0][1]
        places = [place for place, _ in self.points]
        behind = min(max(bisect.bisect(places, sent_bytes), 1), len(places) - 1)
        (start, low), (end, high) = self.points[behind - 1 : behind + 1]
        slope = (high - low) / (end - start)
        return max(0.0, low + slope * (sent_bytes - start))

    @property
    def latency(self) -> float:
        """The seconds of collectives that send almost nothing."""
        return self.seconds(0.0)


class SentRequest(NamedTuple):
    """A request of a method: its kind, and the bytes that a worker sends."""

    kind: Kind
    sent_bytes: float


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a method in one step."""

    encode: float  # seconds until the method makes its last request
    decode: float  # seconds after the last request
    payload_bytes: float  # bytes of a worker's payload
    requests: Sequence[SentRequest]  # the method's requests, in order
    # The share of the residuals in all that a worker could send, by their sums of squares.
    late: float = 0.0

    def scaled(self, factor: float, of_bytes: float) -> Work:
        """The work for a model with `factor` times the time, and `of_bytes` times the bytes."""
        return Work(
            factor * self.encode,
            factor * self.decode,
            of_bytes * self.payload_bytes,
            [SentRequest(kind, of_bytes * sent_bytes) for kind, sent_bytes in self.requests],
            self.late,
        )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step with a method; times are in seconds.

    Attributes:
        method: The compressor, as text.
        compute: The time of everything but the exchange.
        encode: See `Work`.
        latency: The time of its collectives with almost no data.
        transfer: The additional time of its collectives for the sent bytes.
        decode: See `Work`.
        payload_bytes: The bytes of a worker's payload.
        sent_bytes: The bytes that a worker sends in the collectives.
        late: See `Work`.
        trains_like_dense: Whether it did in our measurements; None if it was not measured, or not
            with these settings.
        noise: The uncertainty of the latency in seconds.
    """

    method: str
    compute: float
    encode: float
    latency: float
    transfer: float
    decode: float
    payload_bytes: float
    sent_bytes: float
    late: float = 0.0
    trains_like_dense: bool | None = None
    noise: float = 0.0

    @property
    def exchange(self) -> float:
        """The time of the exchange: the step without computing."""
        return self.encode + self.latency + self.transfer + self.decode

    @property
    def step(self) -> float:
        """The whole step."""
        return self.compute + self.exchange

    def is_clearly_shorter_than(self, other: Prediction) -> bool:
        """Returns whether the step is shorter than another step by more than noise."""
        return self.step + self.noise + other.noise < other.step


def step_with(prediction: Prediction, local_steps: int) -> float:
    """Returns the mean seconds of a step if several local steps share an exchange."""
    return prediction.compute + prediction.exchange / local_steps


def enough_local_steps(prediction: Prediction, share: float = EXCHANGE_SHARE) -> int | None:
    """Returns the fewest local steps with which exchanges take at most a share of the time.

    None if the time of computing is unknown.
    """
    if not prediction.compute:
        return None
    steps = prediction.exchange * (1 - share) / (share * prediction.compute)
    return max(1, math.ceil(round(steps, 6)))  # not one more because of rounding


def best_of(predictions: Sequence[Prediction], baseline: Prediction | None) -> Prediction:
    """Returns the shortest step, or an earlier one that is longer by no more than noise.

    With a baseline, other steps must be shorter by `WORTHWHILE` and by more than noise.
    """
    good = [one for one in predictions if baseline is None or _is_worthwhile(one, baseline)]
    if baseline is not None and not good:
        return baseline
    shortest = min(good, key=lambda one: one.step)
    return next(one for one in good if not shortest.is_clearly_shorter_than(one))


def _is_worthwhile(prediction: Prediction, baseline: Prediction) -> bool:
    saves_enough = prediction.step <= (1 - WORTHWHILE) * baseline.step
    return saves_enough and prediction.is_clearly_shorter_than(baseline)


def predict(
    method: str,
    work: Work,
    curves: Mapping[Kind, Curve],
    compute: float = 0.0,
    trains_like_dense: bool | None = None,
) -> Prediction:
    """Adds up the time of a step."""
    latency = sum(curves[kind].latency for kind, _ in work.requests)
    communicate = sum(curves[kind].seconds(sent_bytes) for kind, sent_bytes in work.requests)
    return Prediction(
        method,
        compute,
        work.encode,
        latency,
        communicate - latency,
        work.decode,
        work.payload_bytes,
        sum(sent_bytes for _, sent_bytes in work.requests),
        work.late,
        trains_like_dense,
        sum(curves[kind].noise for kind, _ in work.requests),
    )
