"""Predicts the time of a step, and advises: computing, encoding, collectives and decoding."""

from __future__ import annotations

import bisect
import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

EXCHANGE_SHARE = 0.1  # the share of the time that local steps leave to the exchange
WORTHWHILE = 0.05  # of a step: predictions are not more exact
WIDTH, _WIDTH_OF_DETAILS = 78, 120  # of the text
_TIMES = ("compute", "encode", "latency", "transfer", "decode", "step")
_RESERVATION = {
    True: "",
    False: " In our measurements, this method trained less well than uncompressed.",
    None: " We did not measure whether this method trains like uncompressed.",
}
_MEASURED = {True: "yes", False: "no", None: "not tried"}
_SHOWN_NOISE = 0.05e-3  # seconds


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
        measured = [measured_bytes for measured_bytes, _ in self.points]
        behind = min(max(bisect.bisect(measured, sent_bytes), 1), len(measured) - 1)
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

    def scaled(self, factor: float, bytes_factor: float) -> Work:
        """The work for a model with `factor` times the time, and `bytes_factor` times the bytes."""
        return Work(
            factor * self.encode,
            factor * self.decode,
            bytes_factor * self.payload_bytes,
            [SentRequest(kind, bytes_factor * sent_bytes) for kind, sent_bytes in self.requests],
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
        """Whether the step is shorter than another step by more than noise."""
        return self.step + self.noise + other.noise < other.step


def enough_local_steps(prediction: Prediction) -> int | None:
    """Returns the fewest local steps with which exchanges take at most a tenth of the time.

    None if the time of computing is unknown.
    """
    if not prediction.compute:
        return None
    share = EXCHANGE_SHARE
    steps = prediction.exchange * (1 - share) / (share * prediction.compute)
    return max(1, math.ceil(round(steps, 6)))  # not one more because of rounding


def best_of(predictions: Sequence[Prediction], baseline: Prediction | None) -> Prediction:
    """Returns the shortest step, or an earlier one that is longer by no more than noise.

    With a baseline, other steps must be shorter by `WORTHWHILE` and by more than noise.
    """
    good = [
        prediction
        for prediction in predictions
        if baseline is None or _is_worthwhile(prediction, baseline)
    ]
    if baseline is not None and not good:
        return baseline
    shortest = min(good, key=lambda prediction: prediction.step)
    return next(
        prediction for prediction in good if not shortest.is_clearly_shorter_than(prediction)
    )


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
        trains_like_dense,
        sum(curves[kind].noise for kind, _ in work.requests),
    )


class ProbeResult(NamedTuple):
    """The findings of a job's probe; equal on all workers."""

    # The predictions for the candidates, in their order, with 0 as `compute`.
    predictions: list[Prediction]
    tables: Sequence[str] = ()  # the paths of embeddings, whose gradients it treated as dense


@dataclasses.dataclass(frozen=True)
class Advice:
    """The advice for a job; as text a sentence and a table.

    Attributes:
        predictions: For each method; the uncompressed baseline first. Empty with one replica.
        best: The recommended `compressor=`: the method with the shortest step, apart from noise.
            This is the baseline unless some method shortens a step by a twentieth, and by more than
            noise.
        verdict: A recommendation, or the statement that compression will not pay.
        table: The predicted steps, at most 78 characters wide.
        details: The parts of the predicted steps, at most 120 characters wide.
    """

    predictions: tuple[Prediction, ...]
    best: str
    verdict: str
    table: str = ""
    details: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the findings, JSON-serializable; times are in seconds."""
        predictions = [
            {
                **dataclasses.asdict(prediction),
                "exchange": prediction.exchange,
                "step": prediction.step,
                "local_steps": enough_local_steps(prediction),
            }
            for prediction in self.predictions
        ]
        return {**dataclasses.asdict(self), "predictions": predictions}

    def __str__(self) -> str:
        return "\n".join(filter(None, [textwrap.fill(self.verdict, WIDTH), self.table]))


def advice_for_one_replica(baseline: str) -> Advice:
    """The advice for a job of one replica."""
    return Advice((), baseline, "Compression will not pay: one worker exchanges nothing.")


def advice_on(probed: ProbeResult, compute: float) -> Advice:
    """Returns the advice for a job of several replicas; `compute` is 0 if it is not known."""
    predictions = tuple(
        dataclasses.replace(prediction, compute=compute) for prediction in probed.predictions
    )
    return Advice(
        predictions,
        best_of(predictions, predictions[0]).method,
        verdict(predictions) + tables_note(probed.tables),
        _table(predictions),
        _details(predictions),
    )


def _table(predictions: Sequence[Prediction]) -> str:
    """Returns a table of all predictions, and sentences on computing and on local steps."""
    baseline, best = predictions[0], best_of(predictions, None)
    what = "a step" if baseline.compute else "an exchange"
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    rows.add_column("", min_width=14, overflow="fold")
    for title in (f"ms {what}", "faster", f"sent {what}"):
        rows.add_column(title, justify="right", no_wrap=True)
    rows.add_column("trains like\nuncompressed", no_wrap=True)
    for prediction in predictions:
        spread = f" ± {_milliseconds(prediction.noise)}" if prediction.noise >= _SHOWN_NOISE else ""
        rows.add_row(
            prediction.method,
            f"{_milliseconds(prediction.step)}{spread}",
            f"{baseline.step / prediction.step:.1f}",
            _bytes(prediction.sent_bytes),
            _MEASURED[prediction.trains_like_dense],
        )
    sentences = []
    if baseline.compute:
        sentences.append(
            f"Of a step without compression, {_milliseconds(baseline.compute)} ms is computing and "
            f"{_milliseconds(baseline.exchange)} ms exchanging."
        )
        sentences.append(
            f"With {best.method} and local_steps={enough_local_steps(best)} or more, the exchange "
            f"takes at most {EXCHANGE_SHARE:.0%} of the time."
        )
    return _text(WIDTH, rows, *sentences)


def _details(predictions: Sequence[Prediction]) -> str:
    """Returns a table of the parts of all predictions."""
    rows = Table(title="Milliseconds of a step", title_justify="left")
    rows.add_column("compressor", min_width=14, overflow="fold")
    for title in (*_TIMES, "bytes sent", "payload bytes"):
        rows.add_column(title, justify="right", no_wrap=True)
    for prediction in predictions:
        times = (_milliseconds(getattr(prediction, name)) for name in _TIMES)
        sizes = (f"{size:,.0f}" for size in (prediction.sent_bytes, prediction.payload_bytes))
        rows.add_row(prediction.method, *times, *sizes)
    return _text(_WIDTH_OF_DETAILS, rows)


def _text(width: int, *parts: Table | str) -> str:
    """Renders tables and sentences as plain text."""
    console = Console(width=width, color_system=None, force_terminal=False, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def verdict(predictions: Sequence[Prediction]) -> str:
    """Recommends a method, or says that compression will not pay; the baseline comes first."""
    baseline = predictions[0]
    best = best_of(predictions, baseline)
    pays = best is not baseline
    if not pays:
        best = min(predictions, key=lambda prediction: prediction.step)
    if best is baseline:
        return f"Compression will not pay: nothing here is faster than {baseline.method}."
    what = "a step" if best.compute else "an exchange"
    steps = f"{_milliseconds(best.step)} instead of {_milliseconds(baseline.step)} ms {what}"
    if pays:
        times = f"about {baseline.step / best.step:.1f} times faster ({steps})"
        return f'Use compressor="{best.method}": {times}.{_RESERVATION[best.trains_like_dense]}'
    if best.step <= (1 - WORTHWHILE) * baseline.step:
        return (
            f"Not decided: {best.method} is the fastest ({steps}), but the measurements vary by "
            f"{_milliseconds(best.noise + baseline.noise)} ms. Try again when the machines and the "
            "network are quiet."
        )
    return f"Compression will not pay: {best.method} is the fastest ({steps})."


def tables_note(paths: Sequence[str]) -> str:
    """A sentence on embeddings, which are exchanged in another way than predicted; or nothing."""
    if not paths:
        return ""
    return (
        f" The gradient of {', '.join(map(repr, paths))} was counted as dense: no_compression and "
        "cast send only the rows of a batch, and may be faster than predicted (docs/advise.md)."
    )


def exchange_times(predictions: Sequence[Prediction]) -> str:
    """Returns the time of a step's exchange with each method, for one line of a log."""
    return ", ".join(
        f"{prediction.method} {_milliseconds(prediction.exchange)} ms" for prediction in predictions
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _bytes(count: float) -> str:
    """Returns a number of bytes in the unit in which people read it."""
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} B"
