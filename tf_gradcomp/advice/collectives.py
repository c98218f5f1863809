"""Times the collectives of a job, for each kind of wish; all workers do the same, and agree."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_gradcomp import _private
from tf_gradcomp.advice.cost_model import Curve, Kind
from tf_gradcomp.advice.timing import call_seconds, seconds_of
from tf_gradcomp.distribute.communicator import (
    AllGather,
    AllReduce,
    Broadcast,
    CollectiveCommunicator,
    Wish,
)

_FEWEST = 512  # elements; what fewer take is latency
_GROWTH = 8  # from one size to the next
_ENOUGH = 0.05  # seconds of a size, behind which there is none larger
_REPEATS = (2, 5)  # of each size: as many as fit into the time that is enough


class Collectives:
    """Times the real collectives of a strategy, which must be one whose replicas talk by them."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self.size = strategy.num_replicas_in_sync
        # Launched from here, and not by `strategy.run`, which there may not be in a replica.
        self._communicators = [
            CollectiveCommunicator(
                _private.launcher(strategy, i), self.size, _private.rank(strategy, i)
            )
            for i in range(len(strategy.extended.worker_devices))
        ]
        self._overhead = self.agree([call_seconds()])[0]

    @property
    def rank(self) -> int:
        """Of the first replica of this process."""
        return int(self._communicators[0].rank)

    def agree(self, numbers: Sequence[float]) -> list[float]:
        """The largest of each number over all workers, which wait for each other here."""
        if not _private.in_multi_worker_mode(self._strategy):
            return list(numbers)
        given = tf.constant([list(numbers)], tf.float64)
        with tf.device("CPU:0"):
            return np.max(_private.host_all_gather(self._strategy, given).numpy(), 0).tolist()

    def curve(self, kind: Kind, most: float) -> Curve:
        """Measures collectives that send up to `most` bytes, but fewer on a slow network."""
        collect = self._function(kind)
        per_element = float(collect(tf.zeros([_FEWEST], kind.dtype))) / _FEWEST  # traces, connects
        sizes = [max(_GROWTH, round(most / per_element))]
        while len(sizes) < 2 or sizes[0] > _GROWTH * _FEWEST:
            sizes.insert(0, sizes[0] // _GROWTH)
        points: list[tuple[float, float]] = []
        for elements in sizes:
            sent_bytes, seconds = self._measure(collect, elements, kind.dtype)
            points.append((sent_bytes, max(0.0, seconds - self._overhead)))
            if seconds >= _ENOUGH and len(points) > 1:
                break
        return Curve(points)

    def _measure(
        self, collect: Callable[[tf.Tensor], tf.Tensor], elements: int, dtype: str
    ) -> tuple[float, float]:
        values = tf.zeros([elements], dtype)
        sent_bytes: list[float] = []

        def timed() -> float:
            self.agree([0.0])  # all are ready
            return seconds_of(lambda: sent_bytes.append(float(collect(values))))

        first = self.agree([timed()])[0]
        fewest, most = _REPEATS
        repeats = min(most, max(fewest, int(_ENOUGH / first)))
        rest = self.agree([timed() for _ in range(repeats - 1)])
        return sent_bytes[0], statistics.median([first, *rest])

    def _function(self, kind: Kind) -> Callable[[tf.Tensor], tf.Tensor]:
        def collect(values: tf.Tensor) -> tf.Tensor:
            sent = [of_one.answer(_wish(kind, values))[1] for of_one in self._communicators]
            return tf.cast(sent[0].sent_bytes, tf.float64)

        signature = [tf.TensorSpec([None], kind.dtype)]
        return tf.function(collect, input_signature=signature, autograph=False)


def _wish(kind: Kind, values: tf.Tensor) -> Wish:
    if kind.wish == AllReduce.__name__:
        return AllReduce(values)
    if kind.wish == AllGather.__name__:
        return AllGather(values, kind.same_length)
    return Broadcast(values, tf.constant(0))
