"""The exchange of dense gradients by a compressor: in jobs, simulations and predictions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tf_gradcomp.compressors.base import RESIDUAL, Compressor, Exchanged, ExchangeInputs
from tf_gradcomp.compressors.protocols import conversation, settings_in_force
from tf_gradcomp.compressors.requests import Request
from tf_gradcomp.compressors.stages import Phased
from tf_gradcomp.exchange import metadata, sparse
from tf_gradcomp.exchange.gradients import add_residuals, all_finite, to_scalars

Result = TypeVar("Result")


class Flags(NamedTuple):
    """Bits of one replica; after the exchange, the logical or of all replicas' bits."""

    # For each gradient that came as slices, the rows that were touched, as bool [rows]; None for
    # the other gradients.
    touched: list[tf.Tensor | None]
    # bool [tensors], which gradients without second moments so far are not all zeros; None without
    # a preconditioner. The payload cannot tell: a gradient may be delayed for many steps before any
    # entry is sent.
    begins: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class ReplicaStep:
    """Input of a step of the compressor for one replica."""

    inputs: ExchangeInputs  # the inputs of the compressor; all gradients are dense
    flags: Flags  # the bits of this replica
    # bool scalar, equal on all replicas: whether any residual may be nonzero.
    residuals_wait: tf.Tensor | bool = True
    residual_scale: float = 1.0  # the residuals divided by this are in units of the gradients
    # bool [1], whether a gradient plus its residual is not finite; None if the compressor adds the
    # residuals.
    overflows: tf.Tensor | None = None

    @classmethod
    def of(
        cls,
        inputs: ExchangeInputs,
        *,
        residuals_wait: tf.Tensor | bool = True,
        residual_scale: float = 1.0,
        not_begun: tf.Tensor | None = None,
    ) -> ReplicaStep:
        """Returns the step of a replica whose gradients may be slices.

        `not_begun` marks the gradients that no replica has had yet; None if nobody asks which
        gradients begin.
        """
        pairs = list(zip(inputs.gradients, inputs.specs, strict=True))
        touched = [
            sparse.touched_rows(gradient, spec.shape[0])
            if isinstance(gradient, tf.IndexedSlices)
            else None
            for gradient, spec in pairs
        ]
        dense = [tf.ensure_shape(sparse.dense(gradient), spec.shape) for gradient, spec in pairs]
        inputs = dataclasses.replace(inputs, gradients=dense)
        begins = None if not_begun is None else _begin(dense, not_begun)
        flags = Flags(touched, begins)
        return cls(inputs, flags, tf.convert_to_tensor(residuals_wait), residual_scale)

    def conversation(
        self, compressor: Compressor
    ) -> Generator[Request, Any, tuple[Exchanged, Flags]]:
        """Exchanges the gradients by a compressor, whose warm-up and phases are ignored.

        Returns the compressor's result, and the flags of all replicas.
        """
        step = self
        has_own = any(RESIDUAL in compressor.state(spec) for spec in self.inputs.specs)
        if not has_own and self.inputs.state.get(RESIDUAL):
            # Another method, in a warm-up, a phase or an earlier job, left this residual.
            step = self.with_residuals()
        exchanged, bits = yield from metadata.with_metadata(
            conversation(compressor, step.inputs),
            tf.concat([tf.zeros([0], tf.bool), *step.bits], 0),
            step.inputs.size,
            functools.partial(step.tag, compressor),
        )
        return exchanged, _finish(step, exchanged, bits)

    def with_residuals(self) -> ReplicaStep:
        """Returns this step with the residuals added to the gradients, if all sums are finite."""
        inputs = self.inputs.preconditioned()
        residuals = [
            tf.raw_ops.ReadVariableOp(resource=residual, dtype=tf.float32)
            for residual in inputs.residuals
        ]
        own = [tf.cast(gradient, tf.float32) for gradient in inputs.gradients]
        sums, _ = add_residuals(
            own, residuals, self.residuals_wait, self.residual_scale, inputs.size
        )
        finite = tf.cond(self.residuals_wait, lambda: all_finite(sums), lambda: tf.constant(True))
        inputs = dataclasses.replace(inputs, gradients=sums)
        return dataclasses.replace(self, inputs=inputs, overflows=tf.logical_not([finite]))

    @property
    def bits(self) -> list[tf.Tensor]:
        """The vectors of bits whose logical or over the replicas every replica must know."""
        every = [*tf.nest.flatten(self.flags), self.overflows]
        return [bits for bits in every if bits is not None]

    def tag(self, compressor: Compressor, dtype: tf.DType) -> tf.Tensor:
        """Returns the tag of this step for a sum in a dtype."""
        settings = settings_in_force(compressor, self.inputs)
        fingerprint = compressor.fingerprint(self.inputs.specs)
        return metadata.tag(fingerprint, self.inputs.step, dtype, self.inputs.size, settings)


def _finish(step: ReplicaStep, exchanged: Exchanged, bits: tf.Tensor) -> Flags:
    """Clears residuals that are sent or that no sum can hold; returns the flags of all replicas."""
    lengths = [part.shape.num_elements() for part in step.bits]
    parts = iter(tf.split(bits, lengths) if lengths else [])
    flags = tf.nest.map_structure(lambda own: None if own is None else next(parts), step.flags)
    if step.overflows is None:
        _clear_where_too_large(step.inputs, exchanged.reduced)
    else:
        # Also if the sum is too large, because it would be too large in all later steps.
        gone = tf.logical_and(step.inputs.finite, tf.logical_not(next(parts)[0]))
        clear = functools.partial(_clear, step.inputs.residuals, step.inputs)
        tf.cond(tf.logical_and(step.residuals_wait, gone), clear, lambda: None)
    return flags


def _clear_where_too_large(inputs: ExchangeInputs, reduced: Sequence[tf.Tensor]) -> None:
    """Clears residuals of variables whose sum overflows float16, so that the step is skipped.

    The remaining residual is as large as the sent values, so all later steps would be skipped, too.
    """
    residuals = inputs.state.get(RESIDUAL, ())
    for residual, total, spec in zip(residuals, reduced, inputs.specs, strict=False):
        if spec.dtype == "float16":
            one = dataclasses.replace(inputs, specs=[spec])
            clear = functools.partial(_clear, [residual], one)
            tf.cond(all_finite([tf.cast(total, tf.float16)]), lambda: None, clear)


def _clear(residuals: Sequence[tf.Tensor], inputs: ExchangeInputs) -> None:
    for residual, spec in zip(residuals, inputs.specs, strict=True):
        tf.raw_ops.AssignVariableOp(resource=residual, value=tf.zeros(spec.shape))


def _begin(gradients: Sequence[tf.Tensor], not_begun: tf.Tensor) -> tf.Tensor:
    """Returns which of the gradients that have not begun are not all zeros; bool [tensors]."""

    def found() -> tf.Tensor:
        dtypes = {gradient.dtype for gradient in gradients}
        zeros = {dtype: tf.zeros([], dtype) for dtype in dtypes}
        nonzero = [tf.not_equal(gradient, zeros[gradient.dtype]) for gradient in gradients]
        return tf.logical_and(tf.stack(to_scalars(tf.reduce_any, nonzero)), not_begun)

    # Most steps need not look at the gradients.
    none = tf.zeros([len(gradients)], tf.bool)
    return tf.cond(tf.reduce_any(not_begun), found, lambda: none)


def by_stage(
    compressor: Compressor, inputs: ExchangeInputs, run: Callable[[Compressor], Result]
) -> Result:
    """Runs the method of this step: a warm-up, a phase, or the compressor itself."""

    def in_turn() -> Result:
        if not isinstance(compressor, Phased):
            return run(compressor)
        branches = [functools.partial(by_stage, one, inputs, run) for one in compressor.phases]
        turn = compressor.phase(inputs.step, inputs.job_state)
        # Without the check, an index that is too large would select the last branch.
        with tf.control_dependencies([tf.debugging.assert_less(turn, len(branches))]):
            return tf.switch_case(tf.identity(turn), branches)

    warmup = compressor.warmup
    if warmup is None:
        return in_turn()
    warming_up = inputs.step < compressor.warmup_steps
    return tf.cond(warming_up, lambda: by_stage(warmup, inputs, run), in_turn)
