"""The base class of compression methods, and the values that it exchanges with its callers."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors import registry
from tf_gradcomp.compressors.requests import Request
from tf_gradcomp.policy import GradientSpec

RESIDUAL = "residual"
VELOCITY = "velocity"  # the momentum of the compressed gradients; see `TopK`
GRADIENT_SUM = "gradient_sum"  # since the last plan of settings; see `LGreCo`
OF_GRADIENTS = (RESIDUAL, VELOCITY, GRADIENT_SUM)  # in units of the compressed gradients
GRADIENT_NORMS = "gradient_norms"  # of the sums before the last plan


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """A float32 variable of zeros that a method keeps for one gradient, on each replica.

    Attributes:
        shape: Its shape.
        shared: Whether a checkpoint holds the first replica's variable and gives it to all
            replicas, because all are equal or only the first counts. Otherwise a checkpoint holds
            the sum over the replicas, and each of N replicas gets 1/N of the sum.
    """

    shape: tuple[int, ...]
    shared: bool = False


@dataclasses.dataclass(frozen=True)
class JobStateSpec:
    """A variable that a method keeps for a whole job and not for one gradient, on each replica.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype; a float, unless it is shared.
        shared: Whether it is equal on all replicas: a checkpoint holds it once and gives it to all
            replicas. Otherwise a checkpoint holds the sum over the replicas, and each of N replicas
            gets 1/N of the sum.
        of_gradients: Whether it is in units of the gradients that the method receives. Such state
            restarts from zeros if the job before divided gradients by second moments and this job
            does not, or the reverse.

    Raises:
        ValueError: If it cannot be divided among replicas.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    shared: bool = True
    of_gradients: bool = False

    def __post_init__(self) -> None:
        if not self.shared and not tf.as_dtype(self.dtype).is_floating:
            raise ValueError(
                f"JobStateSpec: {self.dtype} cannot be divided among another number of replicas; "
                "use a float dtype, or shared=True."
            )


@dataclasses.dataclass(frozen=True)
class ExchangeInputs:
    """The inputs of one replica in one step.

    Attributes:
        specs: The spec of each gradient.
        gradients: Dense tensors, in the shapes and dtypes of `specs`.
        state: What `Compressor.state` asks for, by name: for each gradient the resource handle of
            this replica's variable, which `ops` update.
        step: int64 scalar, equal on all replicas.
        finite: bool scalar, equal on all replicas; if false, all replicas skip the step.
        rank: int32 scalar, this replica's number.
        size: The number of replicas.
        second_moments: The second moments by whose roots the method must divide gradients, if any.
        settings: int64 [tensors], equal on all replicas: the main setting of each variable in this
            step, as the ops take it; it may differ from step to step. None: the method's own
            settings.
        job_state: What `KeepsJobState.job_state` asks for, by name: this replica's variables, which
            first are zeros.
        numbers: The places of these gradients in the list that `KeepsJobState.job_state` received.
            A step may have only some of the job's gradients. None: all gradients, in that order.
    """

    specs: Sequence[GradientSpec]
    gradients: Sequence[tf.Tensor]
    state: Mapping[str, Sequence[tf.Tensor]]
    step: tf.Tensor
    finite: tf.Tensor
    rank: tf.Tensor | int
    size: int
    second_moments: ops.SecondMoments | None = None
    settings: tf.Tensor | None = None
    job_state: Mapping[str, tf.Variable] = dataclasses.field(default_factory=dict)
    numbers: Sequence[int] | None = None

    def preconditioned(self) -> ExchangeInputs:
        """Returns these inputs with divided gradients; updates the second moments."""
        if not self.second_moments:
            return self
        gradients = ops.precondition(self.second_moments, self.gradients)
        return dataclasses.replace(self, gradients=gradients, second_moments=None)

    @property
    def residuals(self) -> Sequence[tf.Tensor]:
        """Resource handles of the residuals, in the shapes of the gradients."""
        return self.state[RESIDUAL]


class Exchanged(NamedTuple):
    """Result of an exchange on one replica.

    Attributes:
        reduced: Dense float32 gradients, summed over the replicas; zeros where a gradient was not
            finite. Valid only if `finite`.
        finite: bool scalar, equal on all replicas; if it is false, the step is skipped. If a
            replica's gradient was not finite, the other replicas have put their packed values back
            into their residuals, if the method keeps any. If only a sum is too large, the packed
            values are dropped.
        tensor_bytes: int64 [tensors], the bytes that each tensor takes in this replica's payload.
    """

    reduced: list[tf.Tensor]
    finite: tf.Tensor
    tensor_bytes: tf.Tensor


class Compressor(abc.ABC):
    """A method with its settings, independent of strategies and Keras, and without state.

    Args:
        warmup_steps: The number of first steps in which `warmup` replaces the method.
        warmup: A compressor, its name or its config. By default gradients travel dense; a gentler
            setting of the same method, perhaps with its own warm-up, makes a schedule.

    Raises:
        TypeError: If the class does not define its own `name`.
        ValueError: If `warmup_steps` is negative, or `warmup` unknown or a choice between methods.

    Attributes:
        name: The name of the method for `gc.compressors.get`.
        helped_by_precondition: Whether it trains better if gradients are first divided by the roots
            of Adam's second moments.
        has_gpu_kernels: Whether its ops also run on a GPU, with all state, and with second moments
            if the method divides gradients itself. State of other methods is copied to the host for
            each step.
        warmup_steps: The number of steps in which `warmup` replaces the method.
        warmup: The method of these steps; None without any.

    `protocols.py` has the members that only some methods provide.
    """

    name: ClassVar[str]
    helped_by_precondition: bool = False
    has_gpu_kernels: bool = False

    def __init__(
        self,
        *,
        warmup_steps: int = 0,
        warmup: str | Mapping[str, Any] | Compressor = "no_compression",
    ) -> None:
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ValueError(
                f"{type(self).__name__}: warmup_steps must be a whole number, 0 or more; received "
                f"{warmup_steps!r}."
            )
        if "name" not in vars(type(self)):
            raise TypeError(
                f"{type(self).__name__} does not define its own `name`; add one to the class. A "
                "file or a worker that finds the name of another class would use that class."
            )
        self.warmup_steps = warmup_steps
        self.warmup: Compressor | None = registry.get(warmup) if warmup_steps else None
        if self.warmup is not None and not isinstance(self.warmup, Compressor):
            raise ValueError(
                f"{type(self).__name__}: the warm-up must be a method; received {self.warmup!r}, "
                "which is a choice. Give its candidates warm-ups instead."
            )

    def __init_subclass__(cls, *, registered: bool = True) -> None:
        if registered and "name" in vars(cls):
            registry.register(cls)

    def state(self, spec: GradientSpec) -> dict[str, StateSpec]:
        """Returns the variables to keep for one gradient, by name; by default, a residual."""
        return {RESIDUAL: StateSpec(spec.shape)}

    @abc.abstractmethod
    def exchange(self, inputs: ExchangeInputs) -> Generator[Request, tf.Tensor, Exchanged]:
        """Runs one replica's side of a step: yields requests and receives the answers."""

    def get_config(self) -> dict[str, Any]:
        """Returns the settings, JSON-serializable, as the constructor takes them."""
        if not self.warmup:
            return {}
        return {"warmup_steps": self.warmup_steps, "warmup": registry.serialize(self.warmup)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Compressor:
        """Returns the compressor with the settings that `get_config` returned."""
        return cls(**config)

    def fingerprint(self, specs: Sequence[GradientSpec]) -> int:
        """Returns a signed 64-bit digest of the settings and the specs of the tensors."""
        facts = [self.name, self.get_config(), [dataclasses.astuple(spec) for spec in specs]]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({settings})"
