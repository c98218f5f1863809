"""Measures a method's own work, and records the collectives that it requests."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp.advice.collectives import call_seconds, timed
from tf_gradcomp.advice.cost_model import Kind, SentRequest, Work
from tf_gradcomp.compressors.base import RESIDUAL, Compressor
from tf_gradcomp.compressors.requests import AllGather, AllReduce, Request
from tf_gradcomp.exchange.replica import ReplicaStep
from tf_gradcomp.groups.communicator import Communicator, Sent, communicate

Agree = Callable[[Sequence[float]], Sequence[float]]


class Echo(Communicator):
    """Answers each request at once, as if all replicas had sent the same data as this replica.

    Args:
        size: The number of replicas.
        rank: The rank of this replica.
        sums: Whether a sum is over all replicas. Otherwise it is this replica's vector: multiplying
            a whole model's gradients would take time that belongs to no method.
    """

    def __init__(self, size: int, rank: tf.Tensor | int, sums: bool) -> None:
        super().__init__(size, rank)
        self._factor = size if sums else 1

    def all_gather(self, row: tf.Tensor) -> tf.Tensor:
        """Returns the row for each replica."""
        return tf.repeat(row, self.size, 0)

    def all_gather_padded(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self.all_gather(payload[tf.newaxis]), tf.size(payload) + 1  # with the length

    def all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sum, or unchanged `values`."""
        return values * tf.cast(self._factor, values.dtype) if self._factor > 1 else values

    def sum(self, request: AllReduce) -> tf.Tensor:
        total = self.all_reduce(request.values)
        if request.metadata is None:
            return total
        return tf.concat([total, request.metadata * self.size], 0)

    def broadcast(self, payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
        """Returns `payload` unchanged."""
        return payload


class Stopwatch(Echo):
    """Records the time of each request, its bytes and its kind.

    Attributes:
        requests: Seconds since the epoch, when the last request was made.
        sent: The bytes of each request.
        kinds: The kind of each request.
    """

    def __init__(self, start: tf.Tensor, size: int, rank: tf.Tensor | int, sums: bool) -> None:
        super().__init__(size, rank, sums)
        self.last_request = start
        self.sent: list[Sent] = []
        self.kinds: list[Kind] = []

    def answer(self, request: Request) -> tuple[Any, Sent]:
        """Answers as soon as the request could be sent."""
        self.kinds.append(kind_of(request))
        with tf.control_dependencies([request.sent]):
            self.last_request = tf.timestamp()
        with tf.control_dependencies([self.last_request]):
            answer, sent = super().answer(request)
        self.sent.append(sent)
        return answer, sent


class CodecSpeed:
    """Times a method on a replica that exchanges gradients only with itself.

    Args:
        compressor: The method, without its warm-up.
        step: Makes the replica's side of the next step, in a graph.
        prepare: Called before each step; its time is not counted.
    """

    def __init__(
        self,
        compressor: Compressor,
        step: Callable[[], ReplicaStep],
        prepare: Callable[[], Any],
    ) -> None:
        self._compressor = compressor
        self._next = step
        self._prepare = prepare
        self._kinds: list[Kind] = []
        self._step = tf.function(self._exchange, autograph=False)

    def run(self, steps: int) -> None:
        """Runs some steps."""
        for _ in range(steps):
            self._prepare()
            self._step()

    def reduced(self) -> Sequence[tf.Tensor]:
        """Runs a step of a method with a residual, and returns the reduced gradients."""
        self._prepare()
        return self._step().reduced

    def measure(self, repeats: int, agree: Agree = list) -> Work:
        """Returns medians over some steps; `agree` takes figures of all workers."""
        self.run(1)  # traces
        whole, encode, sent = [], [], []
        for _ in range(repeats):
            self._prepare()
            seconds, step = timed(self._step)
            whole.append(seconds)
            encode.append(float(step.encode))
            sent.append(step.sent)
        nothing = agree([call_seconds()])[0]
        seconds = statistics.median(agree(whole)) - nothing
        encoding = statistics.median(agree(encode))
        payload, *of_requests = agree(_means(sent))
        requests = [SentRequest(*request) for request in zip(self._kinds, of_requests, strict=True)]
        return Work(encoding, max(0.0, seconds - encoding), payload, requests)

    def _exchange(self) -> _Step:
        """A step, in a graph."""
        start = tf.timestamp()
        with tf.control_dependencies([start]):
            step = self._next()
        inputs = step.inputs
        watch = Stopwatch(start, inputs.size, inputs.rank, sums=RESIDUAL in inputs.state)
        (result,), _ = communicate([step.reduce_by(self._compressor)], [watch])
        self._kinds = watch.kinds
        return _Step(result.reduced.gradients, watch.last_request - start, watch.sent)


class _Step(NamedTuple):
    """The result of a step, the seconds up to its last request, and the bytes of each request."""

    reduced: Any
    encode: tf.Tensor
    sent: list[Sent]


def kind_of(request: Request) -> Kind:
    """The kind of a request."""
    same_length = isinstance(request, AllGather) and request.same_length
    return Kind(type(request).__name__, request.sent.dtype.name, same_length)


def _means(steps: Sequence[Sequence[Sent]]) -> list[float]:
    """Bytes of the payload, then the bytes that a worker sends for each request."""
    count = len(steps)
    payload = sum(float(sent.payload_bytes) for of_step in steps for sent in of_step) / count
    return [
        payload,
        *(
            sum(float(sent.sent_bytes) for sent in of_request) / count
            for of_request in zip(*steps, strict=True)
        ),
    ]
