"""Measures a method's own work on sample gradients, and the collectives that it requests."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tf_gradcomp.adam.preconditioner import SECOND_MOMENT, Preconditioner
from tf_gradcomp.advice.cost_model import Kind, SentRequest, Work
from tf_gradcomp.compressors.base import RESIDUAL, Compressor, StepInputs
from tf_gradcomp.compressors.requests import AllGather, AllReduce, Request
from tf_gradcomp.compressors.stages import Staged
from tf_gradcomp.exchange.replica import ReplicaStep
from tf_gradcomp.exchange.state import handles, new_job_state, new_state
from tf_gradcomp.groups.communicator import Communicator, Sent, communicate
from tf_gradcomp.policy import CONVOLUTION, GradientSpec

_PLACES = 100_000  # where the noise of a step may begin
# From such residuals, which resemble residuals after 300 steps, AdaComp soon sends its typical
# number of entries. From zeros, it needs a hundred steps, and sends ten times as much at first.
_RESIDUAL = 3.0  # standard deviation, in standard deviations of a step's gradients
_WARM_UP, _REPEATS = 10, 6  # even, because alternating PowerSGD differs in odd and even steps
_MANY_UPDATES = 100_000  # Adam's bias correction is over
_CALLS = 7

Agree = Callable[[Sequence[float]], Sequence[float]]
Result = TypeVar("Result")


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

    def measure(self, repeats: int, agree: Agree = list) -> Work:
        """Returns medians over some steps; `agree` takes figures of all workers."""
        self.run(1)  # traces
        exchange_seconds, encode, sent = [], [], []
        for _ in range(repeats):
            self._prepare()
            seconds, step = timed(self._step)
            exchange_seconds.append(seconds)
            encode.append(float(step.encode))
            sent.append(step.sent)
        nothing = agree([call_seconds()])[0]
        seconds = statistics.median(agree(exchange_seconds)) - nothing
        encoding = statistics.median(agree(encode))
        payload, *request_rows = agree(_means(sent))
        requests = [
            SentRequest(*request) for request in zip(self._kinds, request_rows, strict=True)
        ]
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
    payload = sum(float(sent.payload_bytes) for step in steps for sent in step) / count
    return [
        payload,
        *(
            sum(float(sent.sent_bytes) for sent in sent_per_step) / count
            for sent_per_step in zip(*steps, strict=True)
        ),
    ]


class Sample:
    """Random gradients of a part of a model: in each step, a different part of one long vector.

    Args:
        specs: The specs of the model's gradients. Similar gradients are measured as one, because
            tracing many takes longer than running them. For a large model, a part of each is
            measured.
        methods: The methods to measure, whose settings distinguish gradients.
        rank: The rank of this worker; workers have different gradients.
        size: The number of replicas.
        most: The approximate maximum of measured elements.
    """

    def __init__(
        self,
        specs: Sequence[GradientSpec],
        methods: Sequence[Compressor],
        rank: int,
        size: int,
        most: int,
    ) -> None:
        total = sum(spec.elements for spec in specs)
        share = min(1.0, most / max(1, total))
        self._model_specs = specs
        self._specs = _merged(specs, list(map(_settled, methods)), share)
        elements = sum(spec.elements for spec in self._specs)
        self._factor = total / max(1, elements)
        self._rank, self._size = rank, size
        self._random = tf.random.Generator.from_seed(rank)
        self._noise = self._random.normal([elements + _PLACES])
        self._gradients = [tf.Variable(tf.zeros(spec.shape, spec.dtype)) for spec in self._specs]

    def work(
        self, compressor: Compressor, preconditioner: Preconditioner | None, agree: Agree
    ) -> Work:
        """Returns the work of a method in a step of the whole model; see `CodecSpeed`."""
        job_state = new_job_state(compressor, self._specs)
        compressor = _settled(compressor)
        state = new_state(compressor, self._specs, preconditioner)
        compressed = self._size**-0.5 if preconditioner else 1.0
        for residual in state.get(RESIDUAL, ()):
            residual.assign(self._random.normal(residual.shape, stddev=_RESIDUAL * compressed))
        for moment in state.get(SECOND_MOMENT, ()):
            moment.assign(tf.ones(moment.shape))
        step = tf.Variable(0, dtype=tf.int64)

        def next_step() -> ReplicaStep:
            gradients = [gradient.read_value() for gradient in self._gradients]
            state_handles = handles(state)
            second_moments = None
            if preconditioner:
                updates = tf.constant(_MANY_UPDATES, tf.int64)
                second_moments = preconditioner.second_moments(
                    state_handles, updates, self._size, gradients
                )
            now = step.assign_add(1, read_value=True)
            return ReplicaStep.new(
                StepInputs(
                    self._specs,
                    gradients,
                    state_handles,
                    now,
                    tf.constant(True),
                    self._rank,
                    self._size,
                    second_moments,
                    job_state=job_state,
                )
            )

        speed = CodecSpeed(compressor, next_step, self._draw)
        speed.run(_WARM_UP if state else 0)
        measured = speed.measure(_REPEATS, agree)
        return measured.scaled(self._factor, self._bytes_factor(compressor))

    def _bytes_factor(self, compressor: Compressor) -> float:
        """Returns the bytes of all gradients of the model over the sample's bytes."""
        model_bytes = compressor.payload_bytes(self._model_specs)
        tried = compressor.payload_bytes(self._specs)
        return model_bytes / tried if model_bytes and tried else self._factor

    @tf.function(autograph=False)
    def _draw(self) -> None:
        start = self._random.uniform([], maxval=_PLACES, dtype=tf.int32)
        sizes = [spec.elements for spec in self._specs]
        parts = tf.split(self._noise[start : start + sum(sizes)], sizes)
        for gradient, part in zip(self._gradients, parts, strict=True):
            gradient.assign(tf.cast(tf.reshape(part, gradient.shape), gradient.dtype))


def _settled(compressor: Compressor) -> Compressor:
    """The method of most steps in a long job."""
    while isinstance(compressor, Staged):
        compressor = compressor.stages[compressor.main_stage]
    return compressor


def _merged(
    specs: Sequence[GradientSpec], methods: Sequence[Compressor], share: float
) -> list[GradientSpec]:
    """Returns specs of a share of the elements; gradients that differ only by name count once."""
    alike: dict[Any, list[GradientSpec]] = {}
    for spec in specs:
        settings = tuple(tuple(method.settings([spec]) or ()) for method in methods)
        alike.setdefault((dataclasses.replace(spec, path=""), settings), []).append(spec)
    return [_stretched(group[0], share * len(group)) for group in alike.values()]


def _stretched(spec: GradientSpec, factor: float) -> GradientSpec:
    """A spec with `factor` times the elements, shortened or stretched along its longest sides.

    A convolution keeps its smaller number of channels, because ScaleCom may derive a rate from it.
    """
    shape = list(spec.shape)
    channels = range(len(shape))[-2:]
    fewest = min((shape[axis] for axis in channels), default=1)
    for axis in sorted(range(len(shape)), key=shape.__getitem__, reverse=True):
        least = fewest if spec.kind == CONVOLUTION and axis in channels else min(1, shape[axis])
        length = max(least, math.ceil(factor * shape[axis]))
        factor *= shape[axis] / max(1, length)
        shape[axis] = length
    return dataclasses.replace(spec, shape=tuple(shape))
