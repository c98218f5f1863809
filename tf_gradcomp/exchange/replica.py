"""One replica of this process: its variables, and its side of a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp.compressors.base import (
    RESIDUAL,
    Compressor,
    Reduced,
    StepInputs,
    check_reduced,
    start,
)
from tf_gradcomp.exchange import sparse
from tf_gradcomp.exchange.gradients import Gradients, add_residuals, all_finite, to_scalars
from tf_gradcomp.exchange.setup import Setup
from tf_gradcomp.groups import metadata
from tf_gradcomp.groups.communicator import Communicator, RequestStream, Sent
from tf_gradcomp.policy import GradientSpec


class Replica:
    """One replica of this process, which accesses its variables by the indices of gradients.

    Args:
        setup: The parts of the exchange.
        indices: The indices, in the setup, of the gradients.
        local_replica: The number of the replica among the replicas of this process.
        communicator: Reaches the other replicas; None outside a step.
    """

    def __init__(
        self,
        setup: Setup,
        indices: Sequence[int],
        local_replica: int = 0,
        communicator: Communicator | None = None,
    ) -> None:
        self.setup = setup
        self.indices = list(indices)
        self._local_replica = local_replica
        self._communicator = communicator

    @classmethod
    def with_all_gradients(cls, setup: Setup, local_replica: int = 0) -> Replica:
        """Returns a replica with its state of all gradients, outside a step."""
        return cls(setup, range(len(setup.specs)), local_replica)

    @property
    def communicator(self) -> Communicator:
        """The communicator with the other replicas; raises RuntimeError outside a step."""
        if self._communicator is None:
            raise RuntimeError("A replica exchanges gradients only in a step of several replicas.")
        return self._communicator

    def local(self, variable: tf.Variable) -> tf.Variable:
        """Returns this replica's own variable."""
        return self.setup.group.local(variable, self._local_replica)

    @property
    def exchanges(self) -> int:
        """The number of exchanges so far, with the count of a restored checkpoint."""
        return int(self.local(self.setup.variables.step).numpy())

    def state(self, positions: Iterable[int] | None = None) -> dict[str, list[tf.Variable]]:
        """Returns the state of some of the gradients by name; of all by default."""
        indices = (
            self.indices
            if positions is None
            else [self.indices[position] for position in positions]
        )
        return {
            name: [self.local(variables[index]) for index in indices]
            for name, variables in self.setup.variables.state.items()
        }

    def job_state(self) -> dict[str, tf.Variable]:
        """Returns the state of the job by name."""
        return {name: self.local(v) for name, v in self.setup.variables.job_state.items()}

    def fact(self, fact: tf.Variable, positions: Iterable[int] | None = None) -> tf.Tensor:
        """Reads a fact of some of the gradients; of all by default."""
        indices = (
            self.indices
            if positions is None
            else [self.indices[position] for position in positions]
        )
        values = self.local(fact).read_value()
        return values if self._is_every(indices) else tf.gather(values, indices)

    def set_fact(self, fact: tf.Variable, values: Any, positions: Iterable[int]) -> None:
        """Writes a fact of some of the gradients."""
        local, index_list = self.local(fact), [self.indices[position] for position in positions]
        values = tf.convert_to_tensor(values, local.dtype)
        if not self._is_every(index_list):
            indices = tf.constant([[index] for index in index_list])
            values = tf.tensor_scatter_nd_update(local.read_value(), indices, values)
        local.assign(values)

    def _is_every(self, indices: Sequence[int]) -> bool:
        """Whether these are all gradients in their order, so that nothing is selected."""
        return list(indices) == list(range(len(self.setup.specs)))

    @property
    def residual_scale(self) -> float:
        """The residuals divided by this are in units of the gradients."""
        return 1.0 if self.setup.residual_scale is None else self.setup.residual_scale

    def has_residuals(self, positions: Sequence[int]) -> tf.Tensor:
        """Whether the residuals of some gradients may be nonzero."""
        return tf.reduce_any(self.fact(self.setup.variables.facts.has_residual, positions))

    def add_residuals(
        self, positions: Sequence[int], gradients: Gradients, divisor: tf.Tensor | float = 1.0
    ) -> tuple[list[tf.Tensor | tf.IndexedSlices], list[tf.Tensor]]:
        """Adds residuals to the gradients that the compressor does not exchange.

        Returns all gradients; and the new residuals at `positions`, for `write_residuals`.
        """
        residuals = self.state(positions).get(RESIDUAL, [])
        if not residuals:
            return list(gradients), []
        selected = [gradients[position] for position in positions]
        wanted = tf.logical_and(self.has_residuals(positions), all_finite(selected))
        values = [residual.read_value() for residual in residuals]
        scale, size = self.residual_scale / divisor, self.setup.group.size
        found, remaining = add_residuals(selected, values, wanted, scale, size)
        sums = list(gradients)
        for position, gradient in zip(positions, found, strict=True):
            sums[position] = gradient
        return sums, remaining

    def write_residuals(
        self,
        sparse: Sequence[int],
        dense: Sequence[int],
        finite: tf.Tensor,
        remaining: Sequence[tf.Tensor],
    ) -> None:
        """Writes the new residuals after a step."""
        waits = self.setup.variables.facts.has_residual
        if RESIDUAL not in self.setup.variables.state:
            return
        residuals, done = self.state(sparse)[RESIDUAL], list(sparse)
        if self.setup.residual_scale is None:
            done += dense  # the exchange has cleared their residuals
        elif dense:
            self.set_fact(waits, [True] * len(dense), dense)
        if not done:
            return

        def clear() -> None:
            for residual, residual_left in zip(residuals, remaining, strict=True):
                residual.assign(residual_left)
            # Equal on all replicas, unless the residuals of a float16 table differ among them.
            still = [tf.reduce_any(tf.not_equal(residual_left, 0)) for residual_left in remaining]
            self.set_fact(waits, [*still, *[False] * (len(done) - len(sparse))], done)

        tf.cond(tf.logical_and(self.has_residuals(done), finite), clear, lambda: None)

    def count(self, positions: Sequence[int], sent: Sent, tensor_bytes: tf.Tensor) -> None:
        """Counts the bytes of some gradients."""
        indices = [self.indices[position] for position in positions]
        dense_bytes = sum(4 * self.setup.specs[index].elements for index in indices)
        traffic = self.setup.variables.traffic
        traffic.add(self.local(traffic.totals), sent, dense_bytes, indices, tensor_bytes)

    def count_exchange(self, finite: tf.Tensor) -> None:
        """Counts a step, once it is known whether the step is taken or skipped."""
        traffic = self.setup.variables.traffic
        with tf.control_dependencies([finite]):
            traffic.count_exchange(self.local(traffic.totals))


def count_exchange(
    setup: Setup, indices: Sequence[int], sent: Sent, tensor_bytes: tf.Tensor
) -> None:
    """Counts an exchange that the caller has made by itself, on this process's first replica.

    Args:
        setup: The parts of the exchange.
        indices: The indices, in the setup, of the exchanged gradients.
        sent: The bytes that the replica sent.
        tensor_bytes: int64, the bytes of the payload for each of `indices`.
    """
    replica = Replica(setup, indices)
    replica.count(range(len(indices)), sent, tensor_bytes)
    replica.count_exchange(tf.constant(True))
    replica.local(setup.variables.step).assign_add(1)


class ReplicaResult(NamedTuple):
    """What one replica gets of a step by a method.

    Attributes:
        reduced: The result of the method.
        touched: For each gradient that came as slices, the rows that any replica touched, bool
            [rows]; None for the other gradients.
        begins: bool [tensors], which unseen gradients have arrived on any replica; None if they are
            not tracked.
        delayed: bool [tensors], which gradients the method mostly delays.
    """

    reduced: Reduced
    touched: list[tf.Tensor | None]
    begins: tf.Tensor | None
    delayed: tf.Tensor


@dataclasses.dataclass(frozen=True)
class ReplicaStep:
    """Input of a step of the compressor for one replica."""

    inputs: StepInputs  # the inputs of the compressor; all gradients are dense
    # For each gradient that came as slices, the rows that this replica touched, bool [rows]; None
    # for the other gradients.
    touched: list[tf.Tensor | None]
    # bool [tensors], which unseen gradients are not all zeros; None without a preconditioner. The
    # payload cannot tell: a gradient may be delayed for many steps before any entry is sent.
    begins: tf.Tensor | None = None
    # bool scalar, equal on all replicas: whether any residual may be nonzero.
    has_residuals: tf.Tensor | bool = True
    residual_scale: float = 1.0  # the residuals divided by this are in units of the gradients
    # bool [1], whether a gradient plus its residual is not finite; None if the compressor adds the
    # residuals.
    overflows: tf.Tensor | None = None

    @classmethod
    def new(
        cls,
        inputs: StepInputs,
        *,
        residuals_wait: tf.Tensor | bool = True,
        residual_scale: float = 1.0,
        unseen: tf.Tensor | None = None,
    ) -> ReplicaStep:
        """Returns the step of a replica whose gradients may be slices.

        `unseen` is bool [tensors]: True until a gradient arrives that is not all zeros. None skips
        the tracking.
        """
        pairs = list(zip(inputs.gradients, inputs.specs, strict=True))
        touched = [
            sparse.touched_rows(gradient, spec.shape[0])
            if isinstance(gradient, tf.IndexedSlices)
            else None
            for gradient, spec in pairs
        ]
        dense = [_ensure_shape(sparse.dense(gradient), spec.shape) for gradient, spec in pairs]
        inputs = dataclasses.replace(inputs, gradients=dense)
        begins = None if unseen is None else _begin(dense, unseen)
        waits = tf.convert_to_tensor(residuals_wait)
        return cls(inputs, touched, begins, waits, residual_scale)

    def with_residuals(self) -> ReplicaStep:
        """Returns this step with the residuals added to the gradients, if all sums are finite."""
        inputs = self.inputs.preconditioned()
        residuals = [
            tf.raw_ops.ReadVariableOp(resource=residual, dtype=tf.float32)
            for residual in inputs.residuals
        ]
        gradients = [tf.cast(gradient, tf.float32) for gradient in inputs.gradients]
        sums, _ = add_residuals(
            gradients, residuals, self.has_residuals, self.residual_scale, inputs.size
        )
        finite = tf.cond(self.has_residuals, lambda: all_finite(sums), lambda: tf.constant(True))
        inputs = dataclasses.replace(inputs, gradients=sums)
        return dataclasses.replace(self, inputs=inputs, overflows=tf.logical_not([finite]))

    @property
    def bits(self) -> list[tf.Tensor]:
        """The vectors of bits whose logical or over the replicas every replica must know."""
        every = [*self.touched, self.begins, self.overflows]
        return [bits for bits in every if bits is not None]

    def reduce_by(self, compressor: Compressor) -> RequestStream:
        """Returns this replica's side of a step by a method, whose stages are ignored.

        The stream ends with a `ReplicaResult`.
        """
        step, inputs = self, self.inputs
        if inputs.state.get(RESIDUAL) and not keeps_residual(compressor, inputs.specs):
            # Another method, in a warm-up, a stage or an earlier job, left this residual.
            step = self.with_residuals()
        bits = tf.concat([tf.zeros([0], tf.bool), *step.bits], 0)
        new_tag = functools.partial(step.new_tag, compressor)
        travelling = metadata.Metadata(bits, inputs.size, new_tag)
        end = functools.partial(step.end, compressor, travelling)
        return RequestStream(start(compressor, step.inputs), travelling, end)

    def end(
        self, compressor: Compressor, travelling: metadata.Metadata, reduced: Reduced
    ) -> ReplicaResult:
        """Clears residuals that are sent or that no sum can hold; returns the result."""
        inputs = self.inputs
        check_reduced(compressor.name, reduced, inputs.specs)
        lengths = [part.shape.num_elements() for part in self.bits]
        parts = iter(tf.split(travelling.flags, lengths) if lengths else [])
        touched = [None if rows is None else next(parts) for rows in self.touched]
        begins = None if self.begins is None else next(parts)
        if self.overflows is None:
            _clear_where_too_large(inputs, reduced.gradients)
        else:
            # Also if the sum is too large, because it would be too large in all later steps.
            gone = tf.logical_and(inputs.finite, tf.logical_not(next(parts)[0]))
            clear = functools.partial(_clear, inputs.residuals, inputs)
            tf.cond(tf.logical_and(self.has_residuals, gone), clear, lambda: None)
        return ReplicaResult(reduced, touched, begins, compressor.delayed(inputs))

    def new_tag(self, compressor: Compressor, dtype: tf.DType) -> tf.Tensor:
        """Returns the tag of this step for a sum in a dtype."""
        settings = compressor.settings_in_force(self.inputs)
        fingerprint = compressor.fingerprint(self.inputs.specs)
        return metadata.tag(fingerprint, self.inputs.step, dtype, self.inputs.size, settings)


def _ensure_shape(tensor: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Returns a tensor of a shape; without an op if the shape is known, for a small graph."""
    return tensor if tensor.shape == shape else tf.ensure_shape(tensor, shape)


def keeps_residual(compressor: Compressor, specs: Sequence[GradientSpec]) -> bool:
    """True if a method keeps a residual of any of the gradients."""
    return any(RESIDUAL in compressor.state(spec) for spec in specs)


def _clear_where_too_large(inputs: StepInputs, gradients: Sequence[tf.Tensor]) -> None:
    """Clears residuals of variables whose sum overflows float16, so that the step is skipped.

    The remaining residual is as large as the sent values, so all later steps would be skipped, too.
    """
    residuals = inputs.state.get(RESIDUAL, ())
    for residual, total, spec in zip(residuals, gradients, inputs.specs, strict=False):
        if spec.dtype == "float16":
            variable = dataclasses.replace(inputs, specs=[spec])
            clear = functools.partial(_clear, [residual], variable)
            tf.cond(all_finite([tf.cast(total, tf.float16)]), lambda: None, clear)


def _clear(residuals: Sequence[tf.Tensor], inputs: StepInputs) -> None:
    for residual, spec in zip(residuals, inputs.specs, strict=True):
        tf.raw_ops.AssignVariableOp(resource=residual, value=tf.zeros(spec.shape))


def _begin(gradients: Sequence[tf.Tensor], unseen: tf.Tensor) -> tf.Tensor:
    """Returns which of the unseen gradients are not all zeros: bool [tensors]."""

    def find() -> tf.Tensor:
        dtypes = {gradient.dtype for gradient in gradients}
        zeros = {dtype: tf.zeros([], dtype) for dtype in dtypes}
        nonzero = [tf.not_equal(gradient, zeros[gradient.dtype]) for gradient in gradients]
        return tf.logical_and(tf.stack(to_scalars(tf.reduce_any, nonzero)), unseen)

    # Most steps need not look at the gradients.
    none = tf.zeros([len(gradients)], tf.bool)
    return tf.cond(tf.reduce_any(unseen), find, lambda: none)
