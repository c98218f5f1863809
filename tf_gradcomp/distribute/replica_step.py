"""One replica's side of a step, written once for real jobs, simulations and predictions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.base import Compressor, ExchangeInputs
from tf_gradcomp.compressors.wishes import AllGather, AllReduce, Wish, WithRider
from tf_gradcomp.distribute import riders, sparse
from tf_gradcomp.policy import GradientSpec

Result = TypeVar("Result")


class Stepped(NamedTuple):
    """What a step gives each replica.

    Attributes:
        reduced: Dense float32 gradients, summed over the replicas; zeros on a skipped step.
        finite: bool scalar, equal on all replicas: whether the step is to be taken.
        tensor_bytes: int64 [tensors], the bytes that each takes in this replica's payload.
        touched: bool [rows] for each gradient that came as slices, which rows any replica touched;
            None for the others.
    """

    reduced: list[tf.Tensor]
    finite: tf.Tensor
    tensor_bytes: tf.Tensor
    touched: list[tf.Tensor | None]


@dataclasses.dataclass(frozen=True)
class ReplicaStep:
    """What a replica brings to a step.

    Attributes:
        inputs: What the method is given.
        touched: bool [rows] for each gradient that came as slices, which rows this replica
            touched; None for the others.
    """

    inputs: ExchangeInputs
    touched: Sequence[tf.Tensor | None]

    @classmethod
    def of(
        cls,
        specs: Sequence[GradientSpec],
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        state: Mapping[str, Sequence[tf.Tensor]],
        step: tf.Tensor,
        finite: tf.Tensor,
        rank: tf.Tensor | int,
        size: int,
        second_moments: ops.SecondMoments | None = None,
        job_state: Mapping[str, tf.Variable] | None = None,
    ) -> ReplicaStep:
        """The step of a replica whose gradients may be slices; the rest is `ExchangeInputs`'s."""
        touched = [
            sparse.touched_rows(gradient, spec.shape[0])
            if isinstance(gradient, tf.IndexedSlices)
            else None
            for gradient, spec in zip(gradients, specs, strict=True)
        ]
        inputs = ExchangeInputs(
            specs,
            [tf.reshape(sparse.dense(g), s.shape) for g, s in zip(gradients, specs, strict=True)],
            state,
            step,
            finite,
            rank,
            size,
            second_moments,
            job_state=job_state or {},
        )
        return cls(inputs, touched)

    def talk(self, compressor: Compressor) -> Generator[Wish, Any, Stepped]:
        """The method's conversation, with the riders on its first gather or sum."""
        conversation = compressor.conversation(self.inputs)
        answer, of_all = None, None
        while True:
            try:
                wish = conversation.send(answer)
            except StopIteration as end:
                rows = of_all or list(self.touched)
                return Stepped(end.value.reduced, end.value.finite, end.value.tensor_bytes, rows)
            if of_all is None and isinstance(wish, AllGather):
                answer, of_all = yield from self._gather(wish)
            elif of_all is None and isinstance(wish, AllReduce):
                answer, of_all = yield from self._sum(compressor, wish)
            else:
                answer = yield wish

    def _gather(self, wish: AllGather) -> Generator[Wish, Any, tuple[tf.Tensor, list[Any]]]:
        touched = [rows for rows in self.touched if rows is not None]
        if not touched:
            return (yield wish), list(self.touched)
        own = tf.concat(touched, 0)
        answer, words = yield WithRider(wish, riders.rows_as_words(own))
        return answer, self._split(riders.rows_from_words(words, own.shape.num_elements()))

    def _sum(
        self, compressor: Compressor, wish: AllReduce
    ) -> Generator[Wish, Any, tuple[tf.Tensor, list[Any]]]:
        size, dtype = self.inputs.size, wish.values.dtype
        fingerprint = compressor.fingerprint(self.inputs.specs)
        tag = riders.tag(fingerprint, self.inputs.step, dtype, size)
        touched = [rows for rows in self.touched if rows is not None]
        own = tf.concat(touched, 0) if touched else tf.zeros([0], tf.bool)
        numbers = riders.rows_as_numbers(own, dtype, size)
        answer, total = yield WithRider(wish, tf.concat([tag, numbers], 0))
        tags = tag.shape.num_elements()
        with tf.control_dependencies([riders.check_tag(total[:tags], tag, size)]):
            answer = tf.identity(answer)
        rows = own.shape.num_elements()
        return answer, self._split(riders.rows_from_numbers(total[tags:], rows, size))

    def _split(self, rows: tf.Tensor) -> list[tf.Tensor | None]:
        """Splits the rows of all tables by gradient."""
        parts: list[tf.Tensor | None] = []
        start = 0
        for touched in self.touched:
            if touched is None:
                parts.append(None)
            else:
                end = start + touched.shape.num_elements()
                parts.append(rows[start:end])
                start = end
        return parts


def by_stage(
    compressor: Compressor, inputs: ExchangeInputs, run: Callable[[Compressor], Result]
) -> Result:
    """What `run` gives with the method whose turn it is: a warm-up, a phase, or `compressor`.

    Args:
        compressor: A method.
        inputs: Of the step; the turn depends on what is equal on all replicas in them.
        run: Called with a method; in a graph once for each.
    """
    if compressor.warmup:
        warmup = compressor.warmup
        return tf.cond(
            inputs.step < compressor.warmup_steps,
            lambda: by_stage(warmup, inputs, run),
            lambda: _by_phase(compressor, inputs, run),
        )
    return _by_phase(compressor, inputs, run)


def _by_phase(
    compressor: Compressor, inputs: ExchangeInputs, run: Callable[[Compressor], Result]
) -> Result:
    if not compressor.phases:
        return run(compressor)
    branches = [functools.partial(by_stage, phase, inputs, run) for phase in compressor.phases]
    return tf.switch_case(compressor.phase(inputs.step, inputs.job_state), branches)
