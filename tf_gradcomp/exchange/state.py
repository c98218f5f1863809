"""The variables that an exchange keeps from step to step, and facts about their values."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.compressors.base import RESIDUAL, Compressor, JobStateSpec, StateSpec
from tf_gradcomp.compressors.stages import all_stages
from tf_gradcomp.groups.communicator import PrefixSize, Sent
from tf_gradcomp.ops import library
from tf_gradcomp.policy import GradientSpec
from tf_gradcomp.private import tensorflow as tf_private


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Traffic of one replica so far; bytes are totals over `exchanges` steps."""

    exchanges: int
    payload_bytes: int
    sent_bytes: int
    dense_bytes: int
    tensor_bytes: dict[str, int]  # of the payload, by variable path

    def since(self, earlier: Traffic) -> Traffic:
        """Returns the traffic after `earlier`."""
        return Traffic(
            self.exchanges - earlier.exchanges,
            self.payload_bytes - earlier.payload_bytes,
            self.sent_bytes - earlier.sent_bytes,
            self.dense_bytes - earlier.dense_bytes,
            {path: n - earlier.tensor_bytes.get(path, 0) for path, n in self.tensor_bytes.items()},
        )


class TrafficCounter:
    """Counts for each local replica; a plain object, so that no checkpoint holds the totals."""

    def __init__(self, tensors: int) -> None:
        # exchanges, payload bytes, sent bytes, dense bytes, then the bytes of each tensor
        self.totals = tf.Variable(
            np.zeros(4 + tensors, np.int64),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    @staticmethod
    def read(totals: tf.Variable, paths: Sequence[str]) -> Traffic:
        """A replica's totals."""
        exchanges, payload, sent, dense, *tensors = map(int, totals.numpy())
        return Traffic(exchanges, payload, sent, dense, dict(zip(paths, tensors, strict=True)))

    @staticmethod
    def add(
        totals: tf.Variable,
        sent: Sent,
        dense_bytes: int,
        indices: Sequence[int],
        tensor_bytes: tf.Tensor,
    ) -> None:
        """Adds the bytes of some tensors in a step to a replica's totals."""
        tensors = totals.shape[0] - 4
        if list(indices) != list(range(tensors)):
            index_column = tf.constant([[index] for index in indices])
            tensor_bytes = tf.scatter_nd(index_column, tensor_bytes, [tensors])
        head = tf.stack([tf.constant(0, tf.int64), *sent, tf.constant(dense_bytes, tf.int64)])
        totals.assign_add(tf.concat([head, tensor_bytes], 0))

    @staticmethod
    def count_exchange(totals: tf.Variable) -> None:
        """Counts a step."""
        totals.assign_add(tf.one_hot(0, totals.shape[0], dtype=tf.int64))


@contextlib.contextmanager
def state_on_op_device(
    state: Mapping[str, Sequence[tf.Variable]], on_gpu: Collection[str] = ()
) -> Iterator[dict[str, list[tf.Tensor]]]:
    """Yields resource handles of state where the ops can update it, by name.

    A variable on an accelerator is copied to the host for the exchange, and back at the end. A
    variable in `on_gpu` stays on a GPU whose kernels are used.
    """
    copies: list[tuple[tf.Variable, tf.Tensor]] = []

    def handle_of(variable: tf.Variable, has_kernels: bool) -> tf.Tensor:
        if _on_host(variable) or (has_kernels and not library.problem(variable.device)):
            return variable.handle
        handle = _host_copy(variable)
        copies.append((variable, handle))
        return handle

    yield {
        name: [handle_of(variable, name in on_gpu) for variable in variables]
        for name, variables in state.items()
    }
    for variable, handle in copies:
        variable.assign(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32))


def _on_host(variable: tf.Variable) -> bool:
    return tf.DeviceSpec.from_string(variable.device).device_type in (None, "CPU")


def _host_copy(variable: tf.Variable) -> tf.Tensor:
    """A copy that is freed with its last handle, at the end of the step."""
    with tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=variable.shape, shared_name=tf_private.anonymous_name()
        )
        tf.raw_ops.AssignVariableOp(resource=handle, value=variable.read_value())
    return handle


def state_specs(
    compressors: Sequence[Compressor],
    specs: Sequence[GradientSpec],
    preconditioner: Preconditioner | None = None,
) -> dict[str, list[StateSpec]]:
    """Returns the state of each gradient by name, in the order of `specs`.

    Includes the state of the methods, their warm-ups and the preconditioner. Raises ValueError if
    two keep state of one name in different shapes.
    """
    state: dict[str, list[StateSpec]] = {}
    keepers: list[Compressor | Preconditioner] = []
    for compressor in compressors:
        keepers.extend(all_stages(compressor))
    if preconditioner:
        keepers.append(preconditioner)
    for keeper in keepers:
        keeper_specs = [keeper.state(spec) for spec in specs]
        for name in keeper_specs[0] if keeper_specs else ():
            specs_by_tensor = [tensor_spec[name] for tensor_spec in keeper_specs]
            shapes = [tensor_spec.shape for tensor_spec in specs_by_tensor]
            known = [tensor_spec.shape for tensor_spec in state.setdefault(name, specs_by_tensor)]
            if shapes != known:
                raise ValueError(
                    f"{keeper!r} keeps a {name} of another shape than its warm-up or another "
                    "candidate; use settings with equal shapes."
                )
    return state


def residual_scale(compressor: Compressor, specs: Sequence[GradientSpec]) -> float | None:
    """Returns the scale of the residual of a method or one of its stages; None without any."""
    scales = {
        stage.residual_scale
        for stage in all_stages(compressor)
        if any(RESIDUAL in stage.state(spec) for spec in specs)
    }
    if len(scales) > 1:
        raise ValueError(
            f"{compressor!r}: its warm-up or another stage keeps a residual of another scale; give "
            "all stages the same scale (for ScaleCom: beta=1, or the same beta)."
        )
    return scales.pop() if scales else None


def job_state_specs(
    compressors: Sequence[Compressor], specs: Sequence[GradientSpec]
) -> dict[str, JobStateSpec]:
    """Returns the state of the job by name, of the methods, their warm-ups and their phases."""
    state: dict[str, JobStateSpec] = {}
    for compressor in compressors:
        for stage in all_stages(compressor):
            for name, spec in stage.job_state(specs).items():
                if state.setdefault(name, spec) != spec:
                    raise ValueError(
                        f"{stage!r} keeps a {name} for the job in another form than its warm-up, "
                        "another stage or another candidate; use settings with equal forms."
                    )
    return state


def _new_job_variables(state: Mapping[str, JobStateSpec]) -> dict[str, tf.Variable]:
    """The state of the job as variables with a separate value on each replica, by name."""
    return {
        name: local_variable(tf.zeros(spec.shape, spec.dtype), name, spec.shared)
        for name, spec in state.items()
    }


def _new_variables(
    state: dict[str, list[StateSpec]], specs: Sequence[GradientSpec]
) -> dict[str, list[tf.Variable]]:
    """The state as variables, separate on each replica, by name and in the order of `specs`."""
    return {
        name: [
            local_variable(
                tf.zeros(tensor_spec.shape),
                f"{spec.path.replace('/', '_')}_{name}",
                tensor_spec.shared,
            )
            for tensor_spec, spec in zip(specs_by_tensor, specs, strict=True)
        ]
        for name, specs_by_tensor in state.items()
    }


class Facts(tf.Module):
    """Facts about the state of each gradient; equal on all replicas.

    Attributes:
        has_residual: bool [gradients], whether the residual may be nonzero.
        residual_scale: float32 [gradients]: a residual divided by this is in units of the gradient;
            1 for most methods.
        moments_taken: bool [gradients], whether the replicas use their own second moments. If so,
            the residual and the inner optimizer's momentum are in units of divided gradients.
        moments_since: int64 [gradients], the number of updates of the inner optimizer before these
            second moments began; 0 if they continue the inner optimizer's.
    """

    def __init__(self, gradients: int) -> None:
        super().__init__(name="facts")
        self.has_residual = local_variable(np.zeros(gradients, bool), "has_residual", True)
        self.residual_scale = local_variable(np.ones(gradients, "float32"), "residual_scale", True)
        self.moments_taken = local_variable(np.zeros(gradients, bool), "moments_taken", True)
        self.moments_since = local_variable(np.zeros(gradients, "int64"), "moments_since", True)

    def all_zero(self) -> bool:
        """Whether the replicas' state of every gradient is all zeros."""
        return not (self.has_residual.numpy().any() or self.moments_taken.numpy().any())

    @property
    def all(self) -> list[tf.Variable]:
        """All of these variables."""
        return [self.has_residual, self.residual_scale, self.moments_taken, self.moments_since]


class Variables(NamedTuple):
    """All state that an exchange keeps from step to step."""

    # The state that methods keep for each gradient: by name, in the order of the gradients.
    state: dict[str, list[tf.Variable]]
    job_state: dict[str, tf.Variable]  # the state for the whole job, by name
    facts: Facts  # facts about the state of each gradient
    step: tf.Variable  # int64, the number of exchanges so far
    skipped_steps: tf.Variable  # int64, the number of skipped steps among them
    # bool [gradients], which gradients were delayed in the latest step; in no checkpoint.
    delayed: tf.Variable
    traffic: TrafficCounter  # counts bytes; in no checkpoint
    # The number of words that travel with the lengths of payloads, if any; in no checkpoint.
    ahead: PrefixSize | None

    @classmethod
    def of(
        cls,
        state: dict[str, list[StateSpec]],
        job_state: Mapping[str, JobStateSpec],
        specs: Sequence[GradientSpec],
        *,
        ahead: bool,
    ) -> Variables:
        """New variables of zeros for the gradients of `specs`."""
        return cls(
            state=_new_variables(state, specs),
            job_state=_new_job_variables(job_state),
            facts=Facts(len(specs)),
            step=shared_variable(0, tf.int64, "exchange_step"),
            skipped_steps=shared_variable(0, tf.int64, "skipped_steps"),
            delayed=local_variable(np.zeros(len(specs), bool), "delayed", True),
            traffic=TrafficCounter(len(specs)),
            ahead=PrefixSize() if ahead else None,
        )


def local_variable(initial: Any, name: str, equal_on_all: bool) -> tf.Variable:
    """A variable with separate values on replicas; checkpoints hold the first value or the sum."""
    aggregation = tf.VariableAggregation
    return tf.Variable(
        initial,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=aggregation.ONLY_FIRST_REPLICA if equal_on_all else aggregation.SUM,
        name=name,
    )


def shared_variable(initial: Any, dtype: tf.DType, name: str) -> tf.Variable:
    """A variable that is equal on all replicas, which update it together."""
    return tf.Variable(
        initial,
        dtype=dtype,
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        name=name,
    )


State = dict[str, list[tf.Variable]]


def new_state(
    compressor: Compressor,
    specs: Sequence[GradientSpec],
    preconditioner: Preconditioner | None = None,
) -> State:
    """The state that one replica begins with, by name, in the order of `specs`."""
    return {
        name: [
            tf.Variable(tf.zeros(tensor_spec.shape), trainable=False)
            for tensor_spec in tensor_specs
        ]
        for name, tensor_specs in state_specs([compressor], specs, preconditioner).items()
    }


def new_job_state(compressor: Compressor, specs: Sequence[GradientSpec]) -> dict[str, tf.Variable]:
    """Creates one replica's variables of the method's state for the whole job, by name."""
    return {
        name: tf.Variable(tf.zeros(spec.shape, spec.dtype), trainable=False)
        for name, spec in job_state_specs([compressor], specs).items()
    }


def handles(state: State) -> dict[str, list[tf.Tensor]]:
    """The resource handles of a replica's state, as `StepInputs` has them."""
    return {name: [variable.handle for variable in variables] for name, variables in state.items()}


def assign(variables: Sequence[tf.Variable], values: Sequence[Any]) -> None:
    """Assigns values to variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
