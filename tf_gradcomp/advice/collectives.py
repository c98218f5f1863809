"""Times the collectives of a job for each kind of request, with equal results on all workers."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import tensorflow as tf

from tf_gradcomp.advice.cost_model import Curve, Kind
from tf_gradcomp.compressors.requests import AllGather, AllReduce, Broadcast, Request
from tf_gradcomp.groups.communicator import Communicator, WordsAhead
from tf_gradcomp.groups.group import Group

_FEWEST = 512  # the time of fewer elements counts as latency
_GROWTH = 16  # the largest factor from one size to the next
_OVER = 1.2  # a size should take at most this multiple of `enough`
# The repetitions of each size fit into the time limit. For latency, there are enough that a few
# slow collectives do not change the median.
_REPEATS = (2, 15)


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
            self._ahead = WordsAhead()  # as a job has it
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
        for kind, ((elements, first), *others) in measured.items():
            again = self._measure(collects[kind], tf.zeros([elements], kind.dtype), enough)
            least = min(first, again, key=lambda one: one.seconds)
            points = [least, *(timed for _, timed in others)]
            places = [(timed.sent_bytes, timed.seconds) for timed in points]
            curves[kind] = Curve.through(places, least.noise)
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
        apart = 2 * statistics.median(abs(one - median) for one in times)
        return Timed(sent_bytes, max(0.0, median - self._overhead), apart / math.sqrt(repeats))

    def _function(self, kind: Kind) -> Callable[[tf.Tensor], tf.Tensor]:
        def collect(values: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
            request = _request(kind, values)
            answers, sent = zip(*(one.answer(request) for one in self._communicators), strict=True)
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


Result = TypeVar("Result")

_CALLS = 7


def timed(run: Callable[[], Result]) -> tuple[float, Result]:
    """Returns the seconds of a call, and its result; the time to free the result does not count."""
    start = time.perf_counter()
    done = run()
    return time.perf_counter() - start, done


@functools.cache
def call_seconds() -> float:
    """Seconds of a call of an empty function: a median, measured once in a process."""
    value = tf.constant(0)
    nothing = tf.function(lambda: tf.identity(value), autograph=False)
    nothing()  # traces
    return statistics.median(timed(nothing)[0] for _ in range(_CALLS))
