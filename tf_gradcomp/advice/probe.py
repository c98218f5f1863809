"""Predicts the exchanges of several methods in a job before its first step, and chooses one.

The collectives of the job are timed for each kind of request, with equal results on all workers.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_gradcomp.advice.codec_speed import Sample, call_seconds
from tf_gradcomp.advice.cost_model import (
    Curve,
    Kind,
    ProbeResult,
    best_of,
    exchange_times,
    predict,
    tables_note,
)
from tf_gradcomp.compressors.auto import BASELINE, CANDIDATES, DEFAULT
from tf_gradcomp.compressors.base import Compressor
from tf_gradcomp.compressors.registry import text_of
from tf_gradcomp.compressors.requests import AllGather, AllReduce, Broadcast, Request
from tf_gradcomp.exchange.setup import Candidate
from tf_gradcomp.groups.communicator import Communicator, PrefixSize
from tf_gradcomp.groups.group import Group, outside_scope
from tf_gradcomp.groups.messages import log_debug, log_info
from tf_gradcomp.policy import EMBEDDING, GradientSpec

_FEWEST = 512  # the time of fewer elements counts as latency
_GROWTH = 16  # the largest factor from one size to the next
_OVER = 1.2  # a size should take at most this multiple of `enough`
# The repetitions of each size fit into the time limit. For latency, there are enough that a few
# slow collectives do not change the median.
_REPEATS = (2, 15)


class Effort(NamedTuple):
    """The sizes of the gradients and collectives that a probe measures."""

    # The approximate maximum of measured gradient elements; the times of a larger model are scaled
    # up.
    elements: int
    seconds: float  # after a collective that takes this many seconds, no larger one is tried


QUICK = Effort(2_000_000, 0.05)  # about a second, to choose a method
THOROUGH = Effort(8_000_000, 0.5)  # to say how long a step will take


class Timed(NamedTuple):
    """The time of a collective: a median, minus the time of calling TensorFlow.

    Attributes:
        sent_bytes: The bytes that a worker sends.
        seconds: The time.
        noise: The uncertainty of the median in seconds: the interquartile range divided by the
            square root of the number of times.
    """

    sent_bytes: float
    seconds: float
    noise: float


class Collectives:
    """Times the real collectives of a group of replicas."""

    def __init__(self, group: Group, communicators: Sequence[Communicator]) -> None:
        self._group = group
        self._communicators = list(communicators)
        self.size = group.size
        if group.local_size == 1:
            self._ahead = PrefixSize()  # as a job has it
            self._communicators[0].ahead = group.local(self._ahead.words, 0)
        self._overhead = group.processes.largest([call_seconds()])[0]

    @property
    def rank(self) -> int:
        """The rank of the first replica of this process."""
        return int(self._communicators[0].rank)

    def curves(self, most: Mapping[Kind, float], enough: float) -> dict[Kind, Curve]:
        """Measures collectives of each kind.

        The smallest collectives of each kind are measured again at the end. Otherwise, if something
        slows down a machine for a while, methods would differ by the time of their measurement.

        Args:
            most: The bytes of the largest collective of each kind.
            enough: After a collective that takes this many seconds, no larger one is tried.
        """
        collects = {kind: self._function(kind) for kind in most}
        measured = {
            kind: self._points(kind, collect, most[kind], enough)
            for kind, collect in collects.items()
        }
        curves = {}
        for kind, ((elements, first), *larger) in measured.items():
            again = self._measure(collects[kind], tf.zeros([elements], kind.dtype), enough)
            least = min(first, again, key=lambda timed: timed.seconds)
            points = [least, *(timed for _, timed in larger)]
            pairs = [(timed.sent_bytes, timed.seconds) for timed in points]
            curves[kind] = Curve.through(pairs, least.noise)
        return curves

    def _points(
        self, kind: Kind, collect: Callable[[tf.Tensor], tf.Tensor], most: float, enough: float
    ) -> list[tuple[int, Timed]]:
        """Measures collectives of up to `most` bytes; returns their elements and times."""
        per_element = float(collect(tf.zeros([_FEWEST], kind.dtype))) / _FEWEST  # traces, connects
        last = max(_FEWEST, round(most / per_element))
        elements, seconds = _FEWEST // _GROWTH, 0.0
        points: list[tuple[int, Timed]] = []
        while elements < last and not (seconds >= enough and len(points) > 1):
            growth = min(_GROWTH, max(2.0, _OVER * enough / seconds)) if seconds else _GROWTH
            # Two points that are close together would not determine a line.
            elements = last if 2 * growth * elements > last else math.ceil(growth * elements)
            points.append(
                (elements, self._measure(collect, tf.zeros([elements], kind.dtype), enough))
            )
            seconds = points[-1][1].seconds
        return points

    def _measure(
        self, collect: Callable[[tf.Tensor], tf.Tensor], values: tf.Tensor, enough: float
    ) -> Timed:
        sent_bytes = 0.0

        def timed() -> float:
            nonlocal sent_bytes
            self._group.processes.largest([0.0])  # all workers are ready
            start = time.perf_counter()
            sent_bytes = float(collect(values))
            return time.perf_counter() - start

        first = self._group.processes.largest([timed()])[0]  # TCP adapts to the link
        fewest, most = _REPEATS
        repeats = min(most, max(fewest, int(enough / first)))
        times = self._group.processes.largest([timed() for _ in range(repeats)])
        median = statistics.median_low(times)
        apart = 2 * statistics.median(abs(time - median) for time in times)
        # On a busy machine, calls may have taken longer before. No collective takes no time.
        seconds = max(median - self._overhead, median / 2)
        return Timed(sent_bytes, seconds, apart / math.sqrt(repeats))

    def _function(self, kind: Kind) -> Callable[[tf.Tensor], tf.Tensor]:
        def collect(values: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
            request = _request(kind, values)
            answers, sent = zip(
                *(communicator.answer(request) for communicator in self._communicators), strict=True
            )
            # Horovod's operations are stateless: TensorFlow runs them only if it needs their
            # results.
            return tf.cast(sent[0].sent_bytes, tf.float64), list(answers)

        # The length of an all-reduce determines its pieces, so each length needs a trace.
        in_pieces = kind.request == AllReduce.__name__
        signature = None if in_pieces else [tf.TensorSpec([None], kind.dtype)]
        traced = tf.function(collect, input_signature=signature, autograph=False)
        return lambda values: traced(values)[0]


def _request(kind: Kind, values: tf.Tensor) -> Request:
    if kind.request == AllReduce.__name__:
        return AllReduce(values)
    if kind.request == AllGather.__name__:
        return AllGather(values, kind.same_length)
    return Broadcast(values, tf.constant(0))


def probe(
    group: Group,
    specs: Sequence[GradientSpec],
    candidates: Sequence[Candidate],
    effort: Effort,
) -> ProbeResult:
    """Times methods and collectives; all workers of a job call it.

    Raises:
        ValueError: If there is no network between the replicas, or TensorFlow's ops are
            deterministic, which forbids its clock.
    """
    communicators = group.communicators()
    try:
        return outside_scope(lambda: _probe(group, communicators, specs, candidates, effort))
    except tf.errors.FailedPreconditionError as error:
        if "determinism" not in error.message:
            raise
        raise ValueError(
            "Methods cannot be timed under tf.config.experimental.enable_op_determinism(), which "
            "forbids TensorFlow's clock. Name a compressor, such as compressor='adacomp', or let "
            "`gradcomp advise` choose one in a run without it."
        ) from error


def _probe(
    group: Group,
    communicators: Sequence[Communicator],
    specs: Sequence[GradientSpec],
    candidates: Sequence[Candidate],
    effort: Effort,
) -> ProbeResult:
    with tf.device("CPU:0"):
        collectives = Collectives(group, communicators)
        methods = [candidate.compressor for candidate in candidates]
        sample = Sample(specs, methods, collectives.rank, collectives.size, effort.elements)
        works = [sample.work(*candidate, group.processes.largest) for candidate in candidates]
        most: dict[Kind, float] = {}
        for work in works:
            for kind, sent_bytes in work.requests:
                most[kind] = max(sent_bytes, most.get(kind, 0.0))
        curves = collectives.curves(most, effort.seconds)
    predictions = [
        predict(
            text_of(candidate.compressor),
            work,
            curves,
            trains_like_dense=trains_like_dense(candidate),
        )
        for candidate, work in zip(candidates, works, strict=True)
    ]
    return ProbeResult(predictions, [spec.path for spec in specs if spec.kind == EMBEDDING])


# These methods exceed a limit of docs/benchmarks/accuracy.md, by its figures.
_BEHIND = ("scalecom", "random_k", "sign_sgd", "qsgd", "power_sgd")


def trains_like_dense(candidate: Candidate) -> bool | None:
    """Whether a method trained like dense in our measurements; None if not measured.

    Methods that profit from the division by Adam's second moment were measured with it.
    """
    text = text_of(candidate.compressor)
    if text in _BEHIND:
        return False
    as_measured = candidate.preconditioner or not candidate.compressor.helped_by_precondition
    return True if text in CANDIDATES and as_measured else None


def choose(
    group: Group, candidates: Sequence[Candidate], specs: Sequence[GradientSpec]
) -> Candidate:
    """Chooses the fastest candidate by a probe, the same on all replicas; logs the choice.

    If no compression is a candidate, another candidate must be faster by `WORTHWHILE`. If
    candidates differ only by noise, the first is chosen.
    """
    if len(candidates) == 1:
        chosen, reason = candidates[0], ""
    else:
        probed = probe(group, specs, candidates, QUICK)
        predictions = probed.predictions
        dense = (
            prediction
            for prediction, candidate in zip(predictions, candidates, strict=True)
            if candidate.compressor.name == BASELINE
        )
        chosen = candidates[predictions.index(best_of(predictions, next(dense, None)))]
        reason = f" The probe predicted: {exchange_times(predictions)}.{tables_note(probed.tables)}"
    log_info(f"{_exchange_sentence(group, chosen.compressor)}{reason}")
    log_debug(f"The compressor is {chosen.compressor!r}.")
    return chosen


def _exchange_sentence(group: Group, compressor: Compressor) -> str:
    is_one_each = group.size == group.processes.size
    who = f"{group.size} {'worker' if is_one_each else 'replica'}s"
    text = text_of(compressor)
    if text == BASELINE:
        return f"{who} exchange gradients without compression."
    default = " (the default)" if text == DEFAULT else ""
    return f"{who} exchange gradients compressed by {text}{default}."
