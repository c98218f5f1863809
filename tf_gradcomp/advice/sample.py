"""Sample gradients for measuring methods: random numbers in a model's shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.adam.preconditioner import SECOND_MOMENT, Preconditioner
from tf_gradcomp.advice.codec_speed import Agree, CodecSpeed
from tf_gradcomp.advice.cost_model import Work
from tf_gradcomp.compressors.aggregation import leader
from tf_gradcomp.compressors.base import RESIDUAL, Compressor, StepInputs
from tf_gradcomp.compressors.stages import Staged
from tf_gradcomp.exchange.replica import ReplicaStep
from tf_gradcomp.exchange.state import handles, new_job_state, new_state
from tf_gradcomp.policy import CONVOLUTION, GradientSpec

_PLACES = 100_000  # where the noise of a step may begin
# From such residuals, which resemble residuals after 300 steps, AdaComp soon sends its typical
# number of entries. From zeros, it needs a hundred steps, and sends ten times as much at first.
_RESIDUAL = 3.0  # standard deviation, in standard deviations of a step's gradients
_WARM_UP, _REPEATS = 10, 6  # even, because alternating PowerSGD differs in odd and even steps
_MANY_UPDATES = 100_000  # Adam's bias correction is over


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
        self._of_model = specs
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
            of_state = handles(state)
            second_moments = None
            if preconditioner:
                updates = tf.constant(_MANY_UPDATES, tf.int64)
                second_moments = preconditioner.second_moments(
                    of_state, updates, self._size, gradients
                )
            now = step.assign_add(1, read_value=True)
            return ReplicaStep.new(
                StepInputs(
                    self._specs,
                    gradients,
                    of_state,
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
        measured = measured.scaled(self._factor, self._bytes_factor(compressor))
        if RESIDUAL not in state:
            return measured
        # On to a step that this worker leads, if the method has leaders.
        while leader(step + 1, self._size) != self._rank:
            step.assign_add(1)
        sent = [total / self._size for total in speed.reduced()]
        scale = compressor.residual_scale
        waits = [residual / scale for residual in state[RESIDUAL]]
        return dataclasses.replace(measured, late=agree([_late(waits, sent)])[0])

    def _bytes_factor(self, compressor: Compressor) -> float:
        """Returns the bytes of all gradients of the model over the sample's bytes."""
        of_model = compressor.payload_bytes(self._of_model)
        tried = compressor.payload_bytes(self._specs)
        return of_model / tried if of_model and tried else self._factor

    @tf.function(autograph=False)
    def _draw(self) -> None:
        start = self._random.uniform([], maxval=_PLACES, dtype=tf.int32)
        sizes = [spec.elements for spec in self._specs]
        parts = tf.split(self._noise[start : start + sum(sizes)], sizes)
        for gradient, part in zip(self._gradients, parts, strict=True):
            gradient.assign(tf.cast(tf.reshape(part, gradient.shape), gradient.dtype))


def _late(waits: Sequence[tf.Tensor], sent: Sequence[tf.Tensor]) -> float:
    """Returns the squared norm of residuals, relative to that of residuals plus gradients."""
    of_all = sum(float(tf.nn.l2_loss(a + b)) for a, b in zip(waits, sent, strict=True))
    return sum(float(tf.nn.l2_loss(a)) for a in waits) / of_all if of_all else 0.0


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
