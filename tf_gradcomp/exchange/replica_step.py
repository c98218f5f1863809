"""One replica's side of a step, written once for real jobs, simulations and predictions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.base import RESIDUAL, Compressor, ExchangeInputs
from tf_gradcomp.compressors.requests import AllGather, AllReduce, Request, WithRider
from tf_gradcomp.exchange import metadata, sparse
from tf_gradcomp.exchange.gradients import all_finite
from tf_gradcomp.policy import GradientSpec

Result = TypeVar("Result")

_NO_BITS = np.zeros([0], bool)


class Stepped(NamedTuple):
    """What a step gives each replica.

    Attributes:
        reduced: Dense float32 gradients, summed over the replicas; zeros on a skipped step.
        finite: bool scalar, equal on all replicas: whether the step is to be taken.
        tensor_bytes: int64 [tensors], the bytes that each takes in this replica's payload.
        touched: bool [rows] for each gradient that came as slices, which rows any replica touched;
            None for the others.
        delayed: bool [tensors], of which gradients most entries have waited; see
            `Compressor.delayed`.
        begins: bool [tensors], equal on all replicas: of which gradients any replica's own is not
            all zeros, among those that `ReplicaStep.begins` is about; false for the others.
    """

    reduced: list[tf.Tensor]
    finite: tf.Tensor
    tensor_bytes: tf.Tensor
    touched: list[tf.Tensor | None]
    delayed: tf.Tensor
    begins: tf.Tensor

    def as_given(
        self, gradients: Sequence[tf.Tensor | tf.IndexedSlices]
    ) -> tuple[list[tf.Tensor | tf.IndexedSlices], tf.Tensor]:
        """The reduced gradients in the dtypes and forms that those of this replica came in.

        Args:
            gradients: The gradients of this replica.

        Returns:
            The reduced gradients; and whether the step is to be taken: not if a sum does not fit
            into float16.
        """
        reduced = [
            sparse.as_given(gradient, total, rows)
            for gradient, total, rows in zip(gradients, self.reduced, self.touched, strict=True)
        ]
        halves = [one for one in reduced if one.dtype == tf.float16]
        return reduced, tf.logical_and(self.finite, all_finite(halves)) if halves else self.finite


@dataclasses.dataclass(frozen=True)
class ReplicaStep:
    """What a replica brings to a step.

    Attributes:
        inputs: What the method is given.
        touched: bool [rows] for each gradient that came as slices, which rows this replica
            touched; None for the others.
        waits: bool scalar, equal on all replicas: whether anything may be left in the residuals.
        residual_scale: The residuals divided by this are in units of the gradients.
        begins: bool [tensors], which of this replica's gradients are not all zeros, among those
            that no replica had before; None where nobody asks. What a replica sends cannot tell
            it: a gradient may wait for many steps before any of it is sent.
    """

    inputs: ExchangeInputs
    touched: Sequence[tf.Tensor | None]
    waits: tf.Tensor | bool = True
    residual_scale: float = 1.0
    begins: tf.Tensor | None = None

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
        waits: tf.Tensor | bool = True,
        residual_scale: float = 1.0,
        numbers: Sequence[int] | None = None,
        not_begun: tf.Tensor | None = None,
    ) -> ReplicaStep:
        """Returns the step of a replica whose gradients may be slices.

        `not_begun` is bool [tensors], equal on all replicas: which gradients no replica has had
        yet; None if nobody asks which begin. The rest is as in `ExchangeInputs` and `ReplicaStep`.
        """
        touched = [
            sparse.touched_rows(gradient, spec.shape[0])
            if isinstance(gradient, tf.IndexedSlices)
            else None
            for gradient, spec in zip(gradients, specs, strict=True)
        ]
        inputs = ExchangeInputs(
            specs,
            [
                tf.ensure_shape(sparse.dense(g), s.shape)
                for g, s in zip(gradients, specs, strict=True)
            ],
            state,
            step,
            finite,
            rank,
            size,
            second_moments,
            job_state=job_state or {},
            numbers=numbers,
        )
        begins = None if not_begun is None else _begin(inputs.gradients, not_begun)
        return cls(inputs, touched, tf.convert_to_tensor(waits), residual_scale, begins)

    def talk(self, compressor: Compressor) -> Generator[Request, Any, Stepped]:
        """Runs the method's conversation, with the riders on its first gather or sum."""
        residuals = self.inputs.state.get(RESIDUAL)
        keeps = any(RESIDUAL in compressor.state(spec) for spec in self.inputs.specs)
        if keeps or not residuals:
            stepped, _ = yield from self._ride(compressor, self.inputs, _NO_BITS)
            self._drop_beside_what_does_not_fit(residuals or [], stepped.reduced)
            return stepped
        # Another method, in a warm-up, a phase or an earlier job, left what this one must send.
        inputs = self._with(residuals, self.inputs.preconditioned())
        finite = tf.cond(
            self.waits, lambda: all_finite(inputs.gradients), lambda: tf.constant(True)
        )
        stepped, bad = yield from self._ride(compressor, inputs, tf.logical_not([finite]))

        def clear() -> None:
            for residual, spec in zip(residuals, inputs.specs, strict=True):
                tf.raw_ops.AssignVariableOp(resource=residual, value=tf.zeros(spec.shape))

        # Also where the sum is too large, for it would be so in all later steps.
        gone = tf.logical_and(self.inputs.finite, tf.logical_not(bad[0]))
        tf.cond(tf.logical_and(self.waits, gone), clear, lambda: None)
        return stepped

    def _drop_beside_what_does_not_fit(
        self, residuals: Sequence[tf.Tensor], reduced: Sequence[tf.Tensor]
    ) -> None:
        """Clears residuals where float16 cannot hold the sum, so that the step will be skipped.

        What is left there is as large as what was sent, and all later steps would be skipped, too.
        """
        for residual, total, spec in zip(residuals, reduced, self.inputs.specs, strict=False):
            if spec.dtype == "float16":
                clear = functools.partial(
                    tf.raw_ops.AssignVariableOp, resource=residual, value=tf.zeros(spec.shape)
                )
                fits = all_finite([tf.cast(total, tf.float16)])
                tf.cond(fits, lambda: None, lambda clear=clear: clear() and None)

    def _with(self, residuals: Sequence[tf.Tensor], inputs: ExchangeInputs) -> ExchangeInputs:
        """The inputs of a step with what waits in the residuals added to the gradients."""
        gradients = [tf.cast(gradient, tf.float32) for gradient in inputs.gradients]

        def added() -> list[tf.Tensor]:
            return [
                gradient
                + tf.raw_ops.ReadVariableOp(resource=residual, dtype=tf.float32)
                / self.residual_scale
                for gradient, residual in zip(gradients, residuals, strict=True)
            ]

        return dataclasses.replace(inputs, gradients=tf.cond(self.waits, added, lambda: gradients))

    def _ride(
        self, compressor: Compressor, inputs: ExchangeInputs, more: tf.Tensor
    ) -> Generator[Request, Any, tuple[Stepped, tf.Tensor]]:
        """The step; and of more bits, which any replica has set: bool [n], as `more` is."""
        conversation = compressor.conversation(inputs)
        begins = _NO_BITS if self.begins is None else self.begins
        own = tf.concat([*(rows for rows in self.touched if rows is not None), begins, more], 0)
        answer, of_all = None, None
        while True:
            try:
                request = conversation.send(answer)
            except StopIteration as end:
                rows, rest = self._split(own if of_all is None else of_all)
                delayed = compressor.delayed(inputs)
                begins = tf.zeros_like(delayed)
                if self.begins is not None:
                    begins, rest = rest[: len(inputs.specs)], rest[len(inputs.specs) :]
                reduced, finite, tensor_bytes = end.value
                stepped = Stepped(reduced, finite, tensor_bytes, rows, delayed, begins)
                return stepped, rest
            if of_all is None and isinstance(request, AllGather):
                answer, of_all = yield from self._gather(request, own)
            elif of_all is None and isinstance(request, AllReduce):
                answer, of_all = yield from self._sum(compressor, request, own)
            else:
                answer = yield request

    def _gather(
        self, request: AllGather, own: tf.Tensor
    ) -> Generator[Request, Any, tuple[tf.Tensor, tf.Tensor]]:
        bits = own.shape.num_elements()
        if not bits:
            return (yield request), own
        answer, words = yield WithRider(request, metadata.rows_as_words(own))
        return answer, metadata.rows_from_words(words, bits)

    def _sum(
        self, compressor: Compressor, request: AllReduce, own: tf.Tensor
    ) -> Generator[Request, Any, tuple[tf.Tensor, tf.Tensor]]:
        size, dtype = self.inputs.size, request.values.dtype
        fingerprint = compressor.fingerprint(self.inputs.specs)
        settings = compressor.settings_in_force(self.inputs)
        tag = metadata.tag(fingerprint, self.inputs.step, dtype, size, settings)
        numbers = metadata.rows_as_numbers(own, dtype, size)
        tags, bits = tag.shape.num_elements(), own.shape.num_elements()
        if not bits and not tags:
            return (yield request), own
        answer, total = yield WithRider(request, tf.concat([tag, numbers], 0))
        answer = metadata.checked(answer, total[:tags], tf.cast(tag, tf.float32) * size)
        return answer, metadata.rows_from_numbers(total[tags:], bits, size)

    def _split(self, rows: tf.Tensor) -> tuple[list[tf.Tensor | None], tf.Tensor]:
        """Splits the rows of all tables by gradient; and the bits that follow them."""
        parts: list[tf.Tensor | None] = []
        start = 0
        for touched in self.touched:
            if touched is None:
                parts.append(None)
            else:
                end = start + touched.shape.num_elements()
                parts.append(rows[start:end])
                start = end
        return parts, rows[start:]


def _begin(gradients: Sequence[tf.Tensor], not_begun: tf.Tensor) -> tf.Tensor:
    """Returns which gradients, of those that have not begun, are not all zeros; bool [tensors]."""

    def found() -> tf.Tensor:
        some = [tf.reduce_any(tf.not_equal(gradient, 0)) for gradient in gradients]
        return tf.logical_and(tf.stack(some), not_begun)

    # Most steps need not look at the gradients.
    none = tf.zeros([len(gradients)], tf.bool)
    return tf.cond(tf.reduce_any(not_begun), found, lambda: none)


def by_stage(
    compressor: Compressor, inputs: ExchangeInputs, run: Callable[[Compressor], Result]
) -> Result:
    """What `run` gives with the method whose turn it is: a warm-up, a phase, or `compressor`.

    Args:
        compressor: A method.
        inputs: Of the step; the turn depends on what is equal on all replicas in them.
        run: Called with a method; in a graph once for each.
    """

    def in_turn() -> Result:
        if not compressor.phases:
            return run(compressor)
        branches = [functools.partial(by_stage, one, inputs, run) for one in compressor.phases]
        turn = compressor.phase(inputs.step, inputs.job_state)
        # Without the check, a place that there is not would be taken for the last one.
        with tf.control_dependencies([tf.debugging.assert_less(turn, len(branches))]):
            return tf.switch_case(tf.identity(turn), branches)

    warmup = compressor.warmup
    if warmup is None:
        return in_turn()
    warming_up = inputs.step < compressor.warmup_steps
    return tf.cond(warming_up, lambda: by_stage(warmup, inputs, run), in_turn)
