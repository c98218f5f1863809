"""The base class of compression methods; to write one, read this file and `requests.py`.

A method is a subclass of `Compressor` with a `name` and a generator `reduce`. The other members
have defaults; a method overrides those that it needs.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import hashlib
import inspect
import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors import registry
from tf_gradcomp.compressors.requests import Request, check_tensor
from tf_gradcomp.compressors.settings import PerVariable
from tf_gradcomp.policy import GradientSpec

RESIDUAL = "residual"
VELOCITY = "velocity"  # the momentum of the compressed gradients; see `TopK`
GRADIENT_SUM = "gradient_sum"  # since the last plan of settings; see `LGreCo`
GRADIENT_UNITS = (RESIDUAL, VELOCITY, GRADIENT_SUM)  # in units of the compressed gradients

JobState: TypeAlias = Mapping[str, tf.Variable]


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
        in_gradient_units: Whether it is in units of the gradients that the method receives. Such
            state restarts from zeros if the job before divided gradients by second moments and this
            job does not, or the reverse.

    Raises:
        ValueError: If it cannot be divided among replicas.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    shared: bool = True
    in_gradient_units: bool = False

    def __post_init__(self) -> None:
        if not self.shared and not tf.as_dtype(self.dtype).is_floating:
            raise ValueError(
                f"JobStateSpec: {self.dtype} cannot be divided among another number of replicas; "
                "use a float dtype, or shared=True."
            )


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """The inputs of one replica in one step.

    Attributes:
        specs: The spec of each gradient.
        gradients: Dense tensors, in the shapes and dtypes of `specs`.
        state: What `Compressor.state` asks for, by name: for each gradient the resource handle of
            this replica's variable. `ops` update it; plain TensorFlow uses `read_state` and
            `assign_state` of `aggregation.py`.
        step: int64 scalar, equal on all replicas.
        finite: bool scalar, equal on all replicas; if false, all replicas skip the step.
        rank: int32 scalar, this replica's index.
        size: The number of replicas.
        second_moments: The second moments by whose roots the method must divide gradients, if any.
        settings: int64 [tensors], equal on all replicas: the main setting of each variable in this
            step, as the ops take it; it may differ from step to step. None: the method's own
            settings.
        job_state: What `Compressor.job_state` asks for, by name: this replica's variables, which
            first are zeros.
        indices: The indices of these gradients in the list that `Compressor.job_state` received. A
            step may have only some of the job's gradients. None: all gradients, in that order.
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
    indices: Sequence[int] | None = None

    def preconditioned(self) -> StepInputs:
        """Returns these inputs with divided gradients; updates the second moments."""
        if not self.second_moments:
            return self
        gradients = ops.precondition(self.second_moments, self.gradients)
        return dataclasses.replace(self, gradients=gradients, second_moments=None)

    @property
    def residuals(self) -> Sequence[tf.Tensor]:
        """Resource handles of the residuals, in the shapes of the gradients."""
        return self.state[RESIDUAL]


class Reduced(NamedTuple):
    """The result of `Compressor.reduce` on one replica.

    Attributes:
        gradients: Dense float32 gradients, summed over the replicas; zeros where a gradient was not
            finite. Valid only if `finite`.
        finite: bool scalar, equal on all replicas; if it is false, the step is skipped. If a
            replica's gradient was not finite, the other replicas have put their packed values back
            into their residuals, if the method keeps any. If only a sum is too large, the packed
            values are dropped.
        tensor_bytes: int64 [tensors], the bytes that each tensor takes in this replica's payload.
    """

    gradients: list[tf.Tensor]
    finite: tf.Tensor
    tensor_bytes: tf.Tensor


class Hook:
    """What happens between two steps of a job, such as a plan, or the end of a round.

    All workers run a hook between the same two steps. Every method has a default, which does
    nothing:

    - A hook that plans has an `action`. The first replica proposes a change, and all replicas
      install it.
    - A hook whose workers differ for several steps is `pending` until `finish`.
    - A hook whose change travels with a step only states its facts.
    """

    action: ClassVar[str] = ""  # what the hook does, for messages; empty if it never proposes
    state_name: ClassVar[str] = ""  # the state of each gradient on which a proposal is based

    def notices(self) -> list[str]:
        """Returns notices for the user, logged once when the exchange is built."""
        return []

    def facts(self, job_state: JobState) -> dict[str, Any]:
        """Returns the facts that must be equal on all workers whenever they begin to exchange."""
        return {}

    def no_change(self) -> np.ndarray:
        """Returns an array of a proposal's shape and dtype, for workers that wait for it."""
        raise NotImplementedError

    def propose(self, state: Sequence[np.ndarray], job_state: JobState) -> np.ndarray:
        """Returns the proposal of the first replica, by its state `state_name` of each gradient."""
        raise NotImplementedError

    def install(
        self, proposal: np.ndarray, job_state: JobState, state: Sequence[tf.Variable]
    ) -> None:
        """Installs in the state of one replica the proposal of the first replica."""
        raise NotImplementedError

    def in_force(self, job_state: JobState) -> Any:
        """Returns the proposal that the next step will use, from a replica's job state."""
        return None

    @property
    def pending(self) -> bool:
        """Whether work of several steps has begun and not ended."""
        return False

    def finish(self) -> None:
        """Finishes the work; all processes call it between the same two steps."""

    def rolled_back(self) -> contextlib.AbstractContextManager[None]:
        """Restores the state from before the work, within this context."""
        return contextlib.nullcontext()

    def abandon(self) -> None:
        """Forgets the work, because a checkpoint overwrites the changed variables."""


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
            of Adam's second moments. True for a sparse method, until measured.
        has_gpu_kernels: Whether its ops also run on a GPU, with all state, and with second moments
            if the method divides gradients itself. State of other methods is copied to the host for
            each step.
        warmup_steps: The number of steps in which `warmup` replaces the method.
        warmup: The method of these steps; None without any.
        fuses_precondition: Whether `reduce` itself divides gradients by the roots of second
            moments, with the bits of `StepInputs.preconditioned`. Otherwise gradients are divided
            before.
        residual_scale: The residual divided by this is in units of the gradients.
        slices_dtype: The dtype in which `tf.IndexedSlices` are gathered uncompressed; None if the
            method compresses tables as dense gradients.
        whole_setting: The setting with which a sparse method sends a variable whole. With any other
            setting, most entries are delayed in the residual. None for a method without settings or
            one that is not sparse.
    """

    name: ClassVar[str]
    helped_by_precondition: bool = False
    has_gpu_kernels: bool = False
    fuses_precondition: bool = False
    residual_scale: float = 1.0
    slices_dtype: tf.DType | None = None
    whole_setting: int | None = None

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

    def job_state(self, specs: Sequence[GradientSpec]) -> dict[str, JobStateSpec]:
        """Returns the variables to keep for the whole job, by name; by default, none."""
        return {}

    def hook(self, specs: Sequence[GradientSpec], replicas: int) -> Hook | None:
        """Returns what the method does between two steps; by default, nothing."""
        return None

    def settings(self, specs: Sequence[GradientSpec]) -> list[int] | None:
        """Returns the main setting of each variable; None for a method without a main setting.

        Args:
            specs: The spec of each variable's gradient.

        Returns:
            Settings as the ops take them: bits of QSGD, entries of TopK, ranks of PowerSGD, blocks
            of ArcTopK, elements in a bin of AdaComp, or in a chunk of ScaleCom and RandomK. A step
            may bring other settings: see `StepInputs.settings`.
        """
        return None

    def settings_in_force(self, inputs: StepInputs) -> tf.Tensor | None:
        """Returns the settings of this step, int64 [tensors]: of the inputs, or the method's own.

        Raises:
            ValueError: If the inputs have settings, but the method has none.
        """
        settings = self.settings(inputs.specs)
        if settings is None and inputs.settings is not None:
            raise ValueError(f"{self!r} has no setting that differs by variable.")
        settings = settings if inputs.settings is None else inputs.settings
        return None if settings is None else tf.convert_to_tensor(settings, tf.int64)

    def delayed(self, inputs: StepInputs) -> tf.Tensor:
        """Returns which gradients are mostly delayed in the residual: bool [tensors].

        Of these, more than half of the entries stay there in a step. A variable of one element is
        never delayed.
        """
        if self.whole_setting is None:
            return tf.zeros([len(inputs.specs)], tf.bool)
        settings = tf.convert_to_tensor(self.settings_in_force(inputs))[: len(inputs.specs)]
        several = [spec.elements > 1 for spec in inputs.specs]
        return tf.logical_and(tf.not_equal(settings, self.whole_setting), several)

    def payload_bytes(self, specs: Sequence[GradientSpec]) -> int | None:
        """Returns the bytes that a replica sends in each step; None if shapes do not determine it.

        Advice measures gradients with other shapes than the model's gradients. For None, advice
        assumes bytes proportional to the number of elements.
        """
        return None

    @abc.abstractmethod
    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Sums gradients over the replicas: one replica's side of a step.

        A generator, which yields requests and receives their answers.
        """

    def get_config(self) -> dict[str, Any]:
        """Returns the settings, JSON-serializable, as the constructor takes them.

        By default, these are the attributes with the names of the constructor's arguments.

        Raises:
            TypeError: If an argument has no such attribute.
        """
        names = [name for name in _arguments(type(self)) if name not in ("warmup", "warmup_steps")]
        missing = [name for name in names if not hasattr(self, name)]
        if missing:
            raise TypeError(
                f"{type(self).__name__} does not keep its argument {missing[0]!r}: keep it as "
                f"self.{missing[0]}, or define get_config. Workers compare these settings."
            )
        config = {name: _as_config(getattr(self, name)) for name in names}
        if self.warmup:
            config["warmup_steps"] = self.warmup_steps
            config["warmup"] = registry.serialize(self.warmup)
        return config

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


def start(compressor: Compressor, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
    """Starts a method's `reduce`, on divided gradients if there are second moments.

    Raises:
        TypeError: If `reduce` is not a generator.
    """
    if inputs.settings is not None:
        settings = compressor.settings_in_force(inputs)
        inputs = dataclasses.replace(inputs, settings=settings)
    # No op has AMSGrad's second moments.
    amsgrad = inputs.second_moments and inputs.second_moments.largest
    fused = compressor.fuses_precondition and not amsgrad
    requests: Any = compressor.reduce(inputs if fused else inputs.preconditioned())
    if not isinstance(requests, Generator):
        raise TypeError(
            f"{compressor.name}: reduce must be a generator, which yields its requests (`yield "
            f"from ()` if it has none) and returns a Reduced; received {requests!r}."
        )
    return requests


def check_reduced(name: str, reduced: Any, specs: Sequence[GradientSpec]) -> None:
    """Refuses a malformed result of the method `name`, when a step is traced.

    Raises:
        TypeError: If `reduced` is not a `Reduced`, or a field is not a tensor.
        ValueError: If a field has a wrong dtype, shape or number of tensors. The message names it.
    """
    if not isinstance(reduced, Reduced):
        raise TypeError(f"{name}: reduce must return a Reduced; received {reduced!r}.")
    if len(reduced.gradients) != len(specs):
        raise ValueError(
            f"{name}: Reduced.gradients must have a tensor for each of {len(specs)} gradients; "
            f"received {len(reduced.gradients)}."
        )
    for index, (gradient, spec) in enumerate(zip(reduced.gradients, specs, strict=True)):
        check_tensor(f"{name}: Reduced.gradients[{index}]", gradient, [tf.float32], spec.shape)
    check_tensor(f"{name}: Reduced.finite", reduced.finite, [tf.bool], [])
    count = [len(specs)]
    check_tensor(f"{name}: Reduced.tensor_bytes", reduced.tensor_bytes, [tf.int64], count)


def _arguments(class_: type) -> list[str]:
    """Returns the names of a constructor's arguments, without `**warmup`."""
    parameters = inspect.signature(class_).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]


def _as_config(value: Any) -> Any:
    """Returns an attribute as `get_config` has it."""
    if isinstance(value, Compressor):
        return registry.text_of(value)
    if isinstance(value, PerVariable):
        value = value.by_kind
    if isinstance(value, Mapping):
        return {name: _as_config(setting) for name, setting in value.items()}
    return list(value) if isinstance(value, tuple) else value
