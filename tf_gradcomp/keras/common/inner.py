"""The inner optimizer: checks of its type and settings, and the facts that workers compare."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors import registry
from tf_gradcomp.compressors.base import Compressor
from tf_gradcomp.compressors.stages import leaf_stages
from tf_gradcomp.exchange.gradients import path_of
from tf_gradcomp.groups.agreement import WorkersDisagreeError, digest
from tf_gradcomp.groups.group import Group
from tf_gradcomp.keras.common.second_moments import check_moments_not_taken
from tf_gradcomp.keras_version import IS_KERAS_2, NAME, keras, keras_private

_WHAT_HOROVOD_DOES = (
    "gradients would be summed twice, or weights averaged without any sum"
    if IS_KERAS_2
    else "it does nothing under Keras 3, so ranks drift apart without an error"
)


_LEAST_EPSILON_1 = 1e-15  # of Adafactor
_SEND_ALL = ("no_compression", "cast")


def checked_inner(
    inner: Any,
    accepted: type | tuple[type, ...],
    wrapper: type,
    within: Callable[[Any], Iterable[Any]],
) -> Any:
    """Returns the inner optimizer from an optimizer, its config or its name."""
    is_method = isinstance(inner, Compressor) or (
        isinstance(inner, str) and inner.partition("(")[0] in registry.names()
    )
    if is_method:
        raise TypeError(
            f"CompressedOptimizer: the optimizer comes first, then the compressor; received the "
            f"compressor {inner!r} first. Write CompressedOptimizer('adam', {inner!r})."
        )
    if not isinstance(inner, (accepted, Mapping, str)):
        raise TypeError(
            f"CompressedOptimizer: expected a {NAME} optimizer such as "
            f"{keras.__name__}.optimizers.Adam(), its config or its name; received {inner!r}."
            f"{_keras_mismatch(inner)}"
        )
    optimizer = keras.optimizers.get(dict(inner) if isinstance(inner, Mapping) else inner)
    for inside in within(optimizer):
        check_not_by_horovod(type(inside))
        check_moments_not_taken(inside)
        if isinstance(inside, wrapper):
            raise ValueError(
                "CompressedOptimizer: the inner optimizer is already compressed; wrap it only once."
            )
        if isinstance(inside, getattr(keras.optimizers, "MultiOptimizer", ())):
            raise ValueError(
                "CompressedOptimizer: each optimizer in a MultiOptimizer reduces gradients by "
                "itself, so a wrapper around the MultiOptimizer would reduce them twice. Wrap "
                "each optimizer inside: "
                "MultiOptimizer(OptimizerMap(CompressedOptimizer(Adam()), {...}))."
            )
    return optimizer


def in_loss_scaler(optimizer: Any) -> list[Any]:
    """An optimizer and, if it is a loss scaler, its inner optimizer."""
    inside = getattr(optimizer, "inner_optimizer", None)
    return [optimizer] if inside is None else [optimizer, inside]


def clip(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Clips a replica's gradients as the optimizer would, and keeps overflows as they are.

    `clipvalue` would make infinity finite, and the step with it would not be skipped.
    """
    clipped = keras_private.clip(optimizer, gradients, variables)
    if getattr(optimizer, "clipvalue", None) is None:
        return clipped
    return [_with_overflows(*pair) for pair in zip(clipped, gradients, strict=True)]


def _with_overflows(clipped: Any, gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = _with_overflows(clipped.values, gradient.values)
        return tf.IndexedSlices(values, clipped.indices, clipped.dense_shape)
    return tf.where(tf.math.is_finite(gradient), clipped, gradient)


def _keras_mismatch(optimizer: Any) -> str:
    """Returns advice about an optimizer of another Keras version than this process uses."""
    package = type(optimizer).__module__.partition(".")[0]
    if package == "tf_keras" and not IS_KERAS_2:
        return (
            " That is an optimizer of Keras 2: set TF_USE_LEGACY_KERAS=1 before TensorFlow is "
            "imported, "
            "and tf_gradcomp works with tf_keras."
        )
    if package == "keras" and IS_KERAS_2:
        return (
            " tf.keras is Keras 2 here: use tf.keras.optimizers; or, to train with Keras 3, do "
            "not set TF_USE_LEGACY_KERAS."
        )
    return ""


def check_not_by_horovod(optimizer: type) -> None:
    """Refuses an optimizer whose class `hvd.DistributedOptimizer` has replaced."""
    if hasattr(optimizer, "register_local_var"):
        raise ValueError(
            "CompressedOptimizer exchanges gradients itself, and does not work inside or around "
            f"hvd.DistributedOptimizer: {_WHAT_HOROVOD_DOES}, and its compression argument cannot "
            "keep a residual. Use "
            'gc.CompressedOptimizer(optimizer, compressor, group="horovod") alone.'
        )


_INNER_SETTINGS = (
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "weight_decay",
    "use_ema",
    "ema_overwrite_frequency",
    "gradient_accumulation_steps",
)


def check_set_on_inner(wrapper: Any, inside: Sequence[Any], made_with: Collection[str]) -> None:
    """Raises for settings of the wrapper that belong on the inner optimizer.

    `made_with` has the attributes that the wrapper had when it was created; all attributes, if a
    user's class has others.
    """
    useless = [name for name in _INNER_SETTINGS if getattr(wrapper, name, None)]
    later = [name for name in vars(wrapper) if name not in made_with and name[0] != "_"]
    # For example momentum, but not methods, which users may replace.
    inner_settings = [
        name for name in later if any(hasattr(optimizer, name) for optimizer in inside)
    ]
    useless += [name for name in inner_settings if not hasattr(type(wrapper), name)]
    if useless:
        raise ValueError(
            f"CompressedOptimizer: {', '.join(useless)} was set on the wrapper, where it has no "
            f"effect; set it on the optimizer inside: optimizer.inner_optimizer.{useless[0]} = ..."
        )


def check_not_inside(optimizer: Any, applying: Any) -> None:
    """Refuses an inner optimizer that passes gradients, which are already sums, to another one."""
    if applying is not None:
        outer, inner = type(applying).__name__, type(optimizer).__name__
        raise ValueError(
            f"CompressedOptimizer: its inner optimizer, {outer}, applies gradients by another "
            f"optimizer, {inner}, which would sum them over the replicas a second time. Put "
            f"{outer} around it: "
            f"{outer}(CompressedOptimizer({inner}(...)))."
        )


def loses_zeros(optimizer: Any) -> bool:
    """Whether an optimizer makes NaN of gradients that are zero in a row and a column.

    Keras' Adafactor estimates their squares as about the square of its `epsilon_1`. With the
    default of 1e-30, that square underflows to zero in float32.
    """
    adafactor = getattr(keras.optimizers, "Adafactor", ())
    return isinstance(optimizer, adafactor) and optimizer.epsilon_1 < _LEAST_EPSILON_1


def is_partly_adam(optimizer: Any) -> bool:
    """Whether an optimizer updates only some variables as Adam does, so nothing can be divided."""
    return isinstance(optimizer, getattr(keras.optimizers, "Muon", ()))


def warn_of_lost_zeros(optimizer: Any, methods: Iterable[Compressor]) -> None:
    """Warns of an optimizer that makes NaN of the zeros that most methods leave."""
    stages = [stage.name for method in methods for stage in leaf_stages(method)]
    names = [name for name in stages if name not in _SEND_ALL]
    if names and loses_zeros(optimizer):
        warnings.warn(
            f"{type(optimizer).__name__} makes NaN of gradients that are zero in a whole row and "
            f"column, and {names[0]!r} may leave such zeros until it sends the entries. Use "
            f"epsilon_1={_LEAST_EPSILON_1} or more, 'cast', or another optimizer.",
            stacklevel=2,
        )


def facts_of(label: str, optimizer: keras.optimizers.Optimizer) -> dict[str, str]:
    """An optimizer's settings, as text that is the same on all workers with the same program.

    The class alone, if it cannot be saved, such as with a schedule without `get_config`.
    """
    settings = {"class": type(optimizer).__name__}
    with contextlib.suppress(NotImplementedError, TypeError):
        settings |= optimizer.get_config()
    facts = {
        f"{label}'s {name}": json.dumps(_without_ids(value), sort_keys=True, default=_plain)
        for name, value in settings.items()
        if name not in ("name", "inner_optimizer")  # names have numbers, counted by each process
    }
    for inside in in_loss_scaler(optimizer)[1:]:
        facts |= facts_of("loss-scaled optimizer", inside)
    return facts


def _without_ids(value: Any) -> Any:
    """A value of a config without Keras' marks of objects that occur twice in a file."""
    if isinstance(value, Mapping):
        return {str(k): _without_ids(v) for k, v in value.items() if k != "shared_object_id"}
    return [*map(_without_ids, value)] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """Returns a value of a config in a form that JSON can hold."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    config = value.get_config() if hasattr(value, "get_config") else {}
    return {"class": type(value).__name__, **config}


TRAINING = (
    "exchanging gradients for the first time",
    "give all ranks the values of rank 0, with gc.callbacks.BroadcastInitialState() in fit, or "
    "gc.broadcast_initial_state(model).",
)
SAVING = (
    "collecting state to save",
    "only some ranks have changed them since training began, as ReduceLROnPlateau does if its "
    "metric differs on each rank: average the metrics on which callbacks act.",
)


def agree_on_values(
    group: Group,
    weights: Sequence[keras.Variable],
    slots: Sequence[keras.Variable],
    purpose: tuple[str, str],
    seconds: float | None = None,
) -> None:
    """Compares the values of variables over all ranks; raises an error if they differ.

    Names of optimizers' slots contain a number that each rank counts by itself. `purpose` is
    `TRAINING` or `SAVING`.
    """
    values = {f"value of {path_of(v)!r}": _checksum(v) for v in weights}
    values |= {f"value of the optimizer's variable {i}": _checksum(v) for i, v in enumerate(slots)}
    action, advice = purpose
    try:
        group.processes.agree({"next action": action, **values}, seconds)
    except WorkersDisagreeError as error:
        raise WorkersDisagreeError(f"{error} If only values differ: {advice}") from error


def _checksum(variable: keras.Variable) -> str:
    return digest(np.asarray(variable))
