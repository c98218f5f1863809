"""Runs the exchange of several replicas in one process, all in step with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors import Compressor, StepInputs
from tf_gradcomp.compressors.base import RESIDUAL, Reduced, check_reduced, start
from tf_gradcomp.compressors.stages import Staged, run_stage
from tf_gradcomp.exchange.state import handles, new_job_state, new_state
from tf_gradcomp.groups.communicator import RequestStream, Sent, communicate
from tf_gradcomp.groups.lockstep import lockstep_communicators
from tf_gradcomp.groups.metadata import Metadata
from tf_gradcomp.policy import GradientSpec

Arrays = list[np.ndarray]
State = dict[str, Arrays]  # of one replica, by name


class Outcome(NamedTuple):
    """The results of one step; the outer lists are by replica, the inner ones by tensor."""

    reduced: list[Arrays]
    finite: list[bool]
    state: list[State]
    payloads: Arrays  # of the last request: the gathered payloads, or the summed vectors
    tensor_bytes: Arrays
    payload_bytes: list[int] | None = None  # of all requests
    sent_bytes: list[int] | None = None

    @property
    def residuals(self) -> list[Arrays]:
        return [replica.get(RESIDUAL, []) for replica in self.state]


def sums_of(state: Sequence[State], gradients: Sequence[Arrays]) -> tuple[list[Arrays], list[bool]]:
    """Returns each replica's residuals plus gradients, and whether they are finite."""
    sums = [
        [e + g.astype(np.float32) for e, g in zip(replica[RESIDUAL], grads, strict=True)]
        for replica, grads in zip(state, gradients, strict=True)
    ]
    return sums, [all(np.isfinite(array).all() for array in replica) for replica in sums]


def kept_residuals(
    state: Sequence[State], sums: Sequence[Arrays], finite: Sequence[bool]
) -> list[Arrays]:
    """Returns each replica's residuals after a step that replicas skip."""
    return [
        total if is_finite else replica[RESIDUAL]
        for replica, total, is_finite in zip(state, sums, finite, strict=True)
    ]


class End(NamedTuple):
    """The result of one replica's exchange, its payload, and the vectors that it gave."""

    result: Reduced
    sent: Sent
    given: list[tf.Tensor]


def noting(requests, vectors):
    """Passes requests on, and appends the vector of each to `vectors`."""
    answer = None
    while True:
        try:
            request = requests.send(answer)
        except StopIteration as end:
            return end.value
        vectors.append(getattr(request, "sent", None))
        answer = yield request


class Noted(RequestStream):
    """The requests of a method, as the exchange makes them; notes the vectors."""

    def __init__(self, compressor: Compressor, inputs: StepInputs) -> None:
        self.vectors: list[tf.Tensor] = []
        self._name, self._specs = compressor.name, inputs.specs
        none = tf.zeros([0], tf.bool)
        metadata = Metadata(none, inputs.size, lambda dtype: tf.zeros([0], dtype))
        requests = noting(start(compressor, inputs), self.vectors)
        super().__init__(requests, metadata, self._checked)

    def _checked(self, result):
        check_reduced(self._name, result, self._specs)
        return result


def in_lockstep(compressor: Compressor, inputs: Sequence[StepInputs]) -> list[End]:
    """Runs a step of a method on all replicas."""
    recorded = [Noted(compressor, each) for each in inputs]
    results, sent = communicate(recorded, lockstep_communicators(len(recorded)))
    vectors = [each.vectors for each in recorded]
    return [End(*each) for each in zip(results, sent, vectors, strict=True)]


def specs_of(gradients: Sequence[np.ndarray]) -> list[GradientSpec]:
    """A spec for each gradient, of the layer kinds in turn: their bins differ."""
    kinds = ["dense", "convolution", "vector", "recurrent", "embedding"]
    return [
        GradientSpec(f"layer_{i}/kernel", g.shape, g.dtype.name, kinds[i % len(kinds)])
        for i, g in enumerate(gradients)
    ]


class Lockstep:
    """`size` replicas of a compressor, each with its state, which starts at zero.

    With `settings`, int64 [tensors], these count in each step as they are then. `job_state` has the
    variables that each keeps for the job.
    """

    def __init__(
        self,
        compressor: Compressor,
        specs: Sequence[GradientSpec],
        size: int,
        *,
        graph: bool = False,
        settings: tf.Variable | None = None,
    ) -> None:
        self._compressor = compressor
        self._specs = specs
        self._settings = settings
        self._state = [new_state(compressor, specs) for _ in range(size)]
        self.job_state = [new_job_state(compressor, specs) for _ in range(size)]
        self._step = 0
        self._exchange = tf.function(self._exchanged, autograph=False) if graph else self._exchanged

    @property
    def traces(self) -> int:
        """Returns how often the step was traced into a graph."""
        return self._exchange.experimental_get_tracing_count()

    @property
    def state(self) -> list[State]:
        return [
            {
                name: [variable.numpy() for variable in variables]
                for name, variables in replica.items()
            }
            for replica in self._state
        ]

    def step(self, gradients: Sequence[Sequence[np.ndarray]], *, finite: bool = True) -> Outcome:
        """Takes a step; `gradients` are by replica and tensor, and `finite` is the rest of the
        step's flag."""
        tensors = [
            [tf.constant(gradient) for gradient in replica_gradients]
            for replica_gradients in gradients
        ]
        step = tf.constant(self._step, tf.int64)
        ends = self._exchange(tensors, step, tf.constant(finite), self.current_stage(step))
        self._step += 1
        return Outcome(
            [[tensor.numpy() for tensor in end.result.gradients] for end in ends],
            [bool(end.result.finite) for end in ends],
            self.state,
            [last.numpy() for end in ends for last in end.given[-1:]],
            [end.result.tensor_bytes.numpy() for end in ends],
            [int(end.sent.payload_bytes) for end in ends],
            [int(end.sent.sent_bytes) for end in ends],
        )

    def skip_a_step(self) -> None:
        """As one of other variables counts."""
        self._step += 1

    def current_stage(self, step: tf.Tensor) -> Compressor:
        """Returns the stage, if there are any: their requests differ too much for branches."""
        method = self._compressor
        if not isinstance(method, Staged) or step < method.warmup_steps:
            return method
        return method.stages[int(method.stage(step, self.job_state[0]))]

    def _exchanged(
        self,
        gradients: list[list[tf.Tensor]],
        step: tf.Tensor,
        finite: tf.Tensor,
        method: Compressor,
    ) -> list[End]:
        size = len(self._state)
        settings = None if self._settings is None else self._settings.read_value()
        inputs = [
            StepInputs(
                self._specs,
                replica_tensors,
                handles(state),
                step,
                finite,
                rank,
                size,
                settings=settings,
                job_state=job_state,
            )
            for rank, (replica_tensors, state, job_state) in enumerate(
                zip(gradients, self._state, self.job_state, strict=True)
            )
        ]
        return run_stage(
            method,
            inputs[0],
            lambda method: in_lockstep(method, inputs),
        )


def assert_equal_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal in dtype, shape and every bit; so 0 and -0 differ."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    differ = np.flatnonzero(_bits(actual) != _bits(expected))
    assert not differ.size, (
        f"{differ.size} of {actual.size} differ, first at {differ[0]}: "
        f"{actual.reshape(-1)[differ[0]]!r} instead of {expected.reshape(-1)[differ[0]]!r}"
    )


def assert_close(actual: np.ndarray, expected: np.ndarray, error: float) -> None:
    """Equal in dtype and shape, and elements up to `error`; with 0, in every bit."""
    if error == 0:
        return assert_equal_bits(actual, expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=error)


def _bits(values: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat.view(f"u{flat.dtype.itemsize}")
