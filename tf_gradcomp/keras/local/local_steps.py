"""Settings of local steps: workers take several steps on their own weights per exchange."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.base import Compressor
from tf_gradcomp.compressors.settings import is_whole_number
from tf_gradcomp.compressors.stages import Staged
from tf_gradcomp.groups.group import Group
from tf_gradcomp.keras.common.inner import facts_of, in_loss_scaler
from tf_gradcomp.keras_version import IS_KERAS_2, keras

Schedule: TypeAlias = int | Sequence[Sequence[int]] | Callable[[int], int]

_COMPARED = (*range(1000), *range(1000, 100_000, 100))  # steps at which functions must agree
_EXPECTED = (
    "LocalSteps: expected a whole number of steps, at least 1; or a list of (step, number) that "
    "starts at step 0, with steps ascending; or a function of the step. Received "
)


def checked_schedule(steps: Any) -> Schedule:
    """Returns the plain form of a schedule from a number, list, function or config.

    Raises:
        ValueError: If it is not a schedule.
    """
    if isinstance(steps, Mapping):
        steps = keras.saving.deserialize_keras_object(dict(steps))
    if callable(steps):
        return steps
    if is_whole_number(steps, 1, 2**31):
        return int(steps)
    if not isinstance(steps, Sequence) or isinstance(steps, str):
        raise ValueError(f"{_EXPECTED}{steps!r}.")
    before = -1
    for pair in steps:
        good = isinstance(pair, Sequence) and len(pair) == 2 and is_whole_number(pair[1], 1, 2**31)
        if not good or not is_whole_number(pair[0], before + 1, 2**62):
            raise ValueError(f"{_EXPECTED}{steps!r}.")
        before = pair[0]
    if not steps or steps[0][0] != 0:
        raise ValueError(f"{_EXPECTED}{steps!r}.")
    return [[int(step), int(length)] for step, length in steps]


def config_of_schedule(schedule: Schedule) -> Any:
    """Returns the config of a schedule, for `checked_schedule`."""
    return keras.saving.serialize_keras_object(schedule) if callable(schedule) else schedule


def fact_of_schedule(schedule: Schedule) -> Any:
    """Returns the comparable form of a schedule.

    The form of a function is its name, and a digest of the lengths that it returns: workers may
    have different functions of one name.
    """
    if not callable(schedule):
        return schedule
    name = getattr(schedule, "__qualname__", str(type(schedule)))
    lengths = [_length_if_any(schedule, step) for step in _COMPARED]
    digest = hashlib.sha256(repr(lengths).encode()).hexdigest()
    return f"{name}, which begins with {lengths[0]} steps (digest of all: {digest[:8]})"


def _length_if_any(schedule: Callable[[int], int], step: int) -> str:
    """Returns a length as text; if the function fails, so will the step that needs the length."""
    with contextlib.suppress(Exception):
        return str(schedule(step))
    return ""


def length_at(schedule: Schedule, step: tf.Tensor) -> tf.Tensor:
    """Returns the number of steps of a round that begins now.

    Args:
        schedule: As `checked_schedule` returns it.
        step: int64 scalar, the steps of training so far.
    """
    if callable(schedule):
        length = tf.numpy_function(lambda now: _called(schedule, now), [step], tf.int64)
        return tf.ensure_shape(length, [])
    if isinstance(schedule, int):
        return tf.constant(schedule, tf.int64)
    begins, lengths = (tf.constant(column, tf.int64) for column in zip(*schedule, strict=True))
    return tf.gather(lengths, tf.searchsorted(begins, step[tf.newaxis], "right")[0] - 1)


def _called(schedule: Callable[[int], int], step: np.int64) -> np.int64:
    length = schedule(int(step))
    if not is_whole_number(length, 1, 2**31):
        raise ValueError(
            f"LocalSteps: at step {step}, the schedule must return a whole number of at least 1; "
            f"it returned {length!r}."
        )
    return np.int64(length)


_REMEDY = "Leave out local_steps, or use gc.MultiWorkerMirroredStrategy and Keras 3."


class LocalSteps:
    """Settings of local steps, for `CompressedOptimizer(local_steps=...)`.

    In a round, each worker takes `steps` steps of the inner optimizer on its own batches and its
    own weights. The compressor then exchanges the change of each worker's weights. The mean over
    the workers goes to the outer optimizer in place of a gradient. All workers begin the next round
    with the weights that the outer optimizer returns. docs/local_steps.md tells when this pays.

    Args:
        steps: The number of steps in a round. Or a schedule: a list of `(step, number)`. At its
            beginning, a round takes the number of the last pair whose step has been reached, such
            as in `[(0, 1), (500, 8), (2000, 32)]`; or a function that takes the step and returns
            the number. All workers must have the same function.
        outer: A Keras optimizer that updates the common weights, its config or its name. None
            subtracts the mean, so that the common weights become the mean of the workers' weights.
        warmup_steps: The number of synchronous first steps: the compressor exchanges gradients in
            each of them.
        residual_decay: The factor of the residual at the start of each exchange. With 1, nothing is
            lost; below 1, entries that are delayed for many rounds fade.
        fragments: The number of parts of about equal size into which the variables are divided.
            Each part is exchanged once in `steps` steps, and the parts take turns at equal
            intervals. An exchange therefore sends `fragments` times fewer bytes. A variable is
            never split.

    Raises:
        TypeError: If `outer` is not an optimizer.
        ValueError: If a number is out of its range, or `outer` cannot be an outer optimizer.
    """

    def __init__(
        self,
        steps: Schedule,
        outer: Any = None,
        warmup_steps: int = 0,
        residual_decay: float = 1.0,
        fragments: int = 1,
    ) -> None:
        if not is_whole_number(warmup_steps, 0, 2**62):
            raise ValueError(
                "LocalSteps: expected a whole number of warmup_steps, at least 0; "
                f"received {warmup_steps!r}."
            )
        if not 0 <= residual_decay <= 1:
            raise ValueError(
                "LocalSteps: expected a residual_decay between 0 and 1; "
                f"received {residual_decay!r}."
            )
        if not is_whole_number(fragments, 1, 2**31):
            raise ValueError(
                "LocalSteps: expected a whole number of fragments, at least 1; "
                f"received {fragments!r}."
            )
        self.steps = checked_schedule(steps)
        self.outer = _checked_outer(outer)
        self.warmup_steps = int(warmup_steps)
        self.residual_decay = float(residual_decay)
        self.fragments = int(fragments)

    def get_config(self) -> dict[str, Any]:
        """Returns the config, for `LocalSteps.of`."""
        return {
            "steps": config_of_schedule(self.steps),
            "outer": None if self.outer is None else keras.optimizers.serialize(self.outer),
            "warmup_steps": self.warmup_steps,
            "residual_decay": self.residual_decay,
            "fragments": self.fragments,
        }

    @classmethod
    def of(cls, settings: Any) -> LocalSteps | None:
        """Returns the settings from settings, their config or `steps`.

        Raises:
            ValueError: If `settings` is none of these.
        """
        if settings is None or isinstance(settings, LocalSteps):
            return settings
        return cls(**settings) if isinstance(settings, Mapping) else cls(settings)

    def facts(self) -> dict[str, Any]:
        """Returns the settings that must be equal on all workers, by name."""
        settings = {**vars(self), "steps": fact_of_schedule(self.steps)}
        facts = {f"local_steps' {name}": v for name, v in settings.items() if name != "outer"}
        if self.outer is not None:
            facts |= facts_of("outer optimizer", self.outer)
        return facts


def _checked_outer(outer: Any) -> Any:
    """Returns the outer optimizer that was given.

    Raises:
        TypeError: If it is no optimizer.
        ValueError: If it cannot be an outer optimizer.
    """
    if outer is None:
        return None
    if not isinstance(outer, (keras.optimizers.Optimizer, Mapping, str)):
        raise TypeError(
            "LocalSteps: expected a Keras optimizer as outer, its config, its name or None; "
            f"received {outer!r}."
        )
    optimizer = keras.optimizers.get(dict(outer) if isinstance(outer, Mapping) else outer)
    settings = ("use_ema", "gradient_accumulation_steps", "loss_scale_factor")
    unfit = [name for name in settings if getattr(optimizer, name, None)]
    if hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers"):
        unfit.append("another optimizer inside")
    if unfit:
        raise ValueError(
            f"LocalSteps: the outer optimizer has {', '.join(unfit)}, which has no meaning between "
            "two rounds; use a plain optimizer such as keras.optimizers.SGD(0.7, momentum=0.9, "
            "nesterov=True)."
        )
    if optimizer.built:
        raise ValueError(
            "LocalSteps: the outer optimizer is already in use; give each CompressedOptimizer its "
            "own outer optimizer."
        )
    return optimizer


def check_can_be_local(inner: Any, group: Group | None, precondition: str | None) -> None:
    """Refuses local steps in settings in which they would not train as documented.

    Args:
        inner: The inner optimizer.
        group: The replicas; None in a simulation.
        precondition: The argument of `CompressedOptimizer`.

    Raises:
        ValueError: With the reason and the way out.
    """
    problem, remedy = None, _REMEDY
    core = in_loss_scaler(inner)[-1]
    if IS_KERAS_2:
        problem = "Keras 2's optimizers cannot take them"
    elif group and not group.by_strategy:
        problem = "Horovod's ranks cannot take them"
    elif group and group.local_size > 1:
        problem = (
            "each replica of a worker exchanges separately here, because there is only one worker "
            "or the strategy has two_level=False"
        )
    elif precondition == "local":
        problem = (
            'precondition="local" is for gradients, and rounds exchange differences of weights, '
            f"which {type(core).__name__} has already scaled"
        )
        remedy = 'Use precondition="auto", which divides nothing in rounds.'
    elif core.use_ema:
        problem = "use_ema would average the weights of each worker by itself"
    if problem:
        raise ValueError(f"CompressedOptimizer: local_steps was given, but {problem}. {remedy}")


def check_method(compressor: Compressor) -> None:
    """Refuses a method that is trained between steps, such as LGC.

    Raises:
        ValueError: With the way out.
    """
    if isinstance(compressor, Staged):
        raise ValueError(
            f"CompressedOptimizer: local_steps was given, and {compressor.name!r} learns from the "
            "gradients of each step. Leave out local_steps, or use another method."
        )
