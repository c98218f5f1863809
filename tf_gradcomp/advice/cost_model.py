"""How long a step takes with a method: computing, encoding, its collectives, decoding."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of wish: those of one kind differ in bytes alone.

    Attributes:
        wish: The name of its class, such as `"AllReduce"`.
        dtype: Of what is given, such as `"float32"`.
        same_length: Of an `AllGather`; otherwise False.
    """

    wish: str
    dtype: str
    same_length: bool = False


@dataclasses.dataclass(frozen=True)
class Curve:
    """How long the collectives for one kind of wish take by the bytes that they make a worker send.

    Between two points it is a line, and behind the last one it goes on as between the last two:
    latency, and bytes over a bandwidth.

    Attributes:
        points: Pairs of bytes and seconds, of which there is at least one; bytes grow.
    """

    points: Sequence[tuple[float, float]]

    @classmethod
    def through(cls, measured: Sequence[tuple[float, float]]) -> Curve:
        """The curve without what was disturbed: fewer bytes take no longer than more."""
        points: list[tuple[float, float]] = []
        least = float("inf")
        for sent_bytes, seconds in reversed(measured):
            least = min(least, seconds)
            points.insert(0, (sent_bytes, least))
        return cls(points)

    def seconds(self, sent_bytes: float) -> float:
        """Of collectives that make a worker send so many bytes."""
        if len(self.points) == 1:
            return self.points[0][1]
        places = [place for place, _ in self.points]
        behind = min(max(bisect.bisect(places, sent_bytes), 1), len(places) - 1)
        (start, low), (end, high) = self.points[behind - 1 : behind + 1]
        slope = (high - low) / (end - start)
        return max(0.0, low + slope * (sent_bytes - start))

    @property
    def latency(self) -> float:
        """Seconds, however little is sent."""
        return self.seconds(0.0)


class Asked(NamedTuple):
    """A wish of a step, as far as it costs anything: its kind, and bytes that a worker sends."""

    kind: Kind
    sent_bytes: float


@dataclasses.dataclass(frozen=True)
class Work:
    """What a method does in a step.

    Attributes:
        encode: Seconds until it asks for the last of its wishes.
        decode: Seconds behind that.
        payload_bytes: What a worker gives to be sent.
        asked: Its wishes, in turn.
    """

    encode: float
    decode: float
    payload_bytes: float
    asked: Sequence[Asked]

    def scaled(self, factor: float) -> Work:
        """That of a model `factor` times as large."""
        return Work(
            factor * self.encode,
            factor * self.decode,
            factor * self.payload_bytes,
            [Asked(kind, factor * sent_bytes) for kind, sent_bytes in self.asked],
        )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step with a method; times are in seconds.

    Attributes:
        method: The compressor, as text.
        compute: All that is not the exchange.
        encode: See `Work`.
        latency: Of its collectives, whatever they carry.
        transfer: What they take in addition for what they carry.
        decode: See `Work`.
        payload_bytes: What a worker gives to be sent.
        sent_bytes: What the collectives make it send.
    """

    method: str
    compute: float
    encode: float
    latency: float
    transfer: float
    decode: float
    payload_bytes: float
    sent_bytes: float

    @property
    def exchange(self) -> float:
        """All but computing."""
        return self.encode + self.latency + self.transfer + self.decode

    @property
    def step(self) -> float:
        """The whole step."""
        return self.compute + self.exchange


def predict(
    method: str, work: Work, curves: Mapping[Kind, Curve], compute: float = 0.0
) -> Prediction:
    """Adds up a step.

    Args:
        method: The compressor, as text.
        work: What it does.
        curves: Of all kinds of its wishes.
        compute: Seconds of a step without its exchange.
    """
    latency = sum(curves[kind].latency for kind, _ in work.asked)
    communicate = sum(curves[kind].seconds(sent_bytes) for kind, sent_bytes in work.asked)
    return Prediction(
        method,
        compute,
        work.encode,
        latency,
        communicate - latency,
        work.decode,
        work.payload_bytes,
        sum(sent_bytes for _, sent_bytes in work.asked),
    )
