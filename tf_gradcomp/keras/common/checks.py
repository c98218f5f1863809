"""What `CompressedOptimizer` refuses, with the reason and the way out."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.compressors.base import Compressor, in_turn
from tf_gradcomp.compressors.variable_settings import HasSettings
from tf_gradcomp.exchange.gradients import native, path_of
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.handshake import WorkersDisagreeError
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras.common.version import IS_KERAS_2, NAME, keras
from tf_gradcomp.policy import GradientSpec

_WHAT_HOROVOD_DOES = (
    "gradients would be summed twice, or averages of weights taken without any sum"
    if IS_KERAS_2
    else "that one does nothing under Keras 3, so that ranks drift apart without an error"
)


def checked_inner(
    inner: Any,
    accepted: type | tuple[type, ...],
    wrapper: type,
    within: Callable[[Any], Iterable[Any]],
) -> Any:
    """The inner optimizer that was given.

    Args:
        inner: An optimizer, its config or its name.
        accepted: The classes of optimizers of the Keras in use.
        wrapper: The class that wraps it, and must not do so twice.
        within: Gives an optimizer and all that it wraps.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it cannot be wrapped.
    """
    if not isinstance(inner, (accepted, Mapping, str)):
        raise TypeError(
            f"CompressedOptimizer: expected a {NAME} optimizer such as "
            f"{keras.__name__}.optimizers.Adam(), its config or its name; received {inner!r}."
            f"{_of_other_keras(inner)}"
        )
    optimizer = keras.optimizers.get(dict(inner) if isinstance(inner, Mapping) else inner)
    for inside in within(optimizer):
        check_not_by_horovod(type(inside))
        check_moments_are_its_own(inside)
        if isinstance(inside, wrapper):
            raise ValueError(
                "CompressedOptimizer: the inner optimizer is compressed already; wrap it once."
            )
        if isinstance(inside, getattr(keras.optimizers, "MultiOptimizer", ())):
            raise ValueError(
                "CompressedOptimizer: each optimizer in a MultiOptimizer reduces gradients by "
                "itself, so one around all of them would reduce twice. Wrap each of those inside: "
                "MultiOptimizer(OptimizerMap(CompressedOptimizer(Adam()), {...}))."
            )
    return optimizer


def checked_reduction(reduction: Any) -> str | None:
    """Returns the reduction that was given.

    Raises:
        ValueError: If there is no such reduction.
    """
    if reduction not in (None, "sum", "mean"):
        raise ValueError(
            'CompressedOptimizer: reduction must be "sum", "mean", or None for the sum under a '
            f"strategy and the mean under Horovod; received {reduction!r}."
        )
    return reduction


def in_loss_scaler(optimizer: Any) -> list[Any]:
    """An optimizer and, if it is a loss scaler, the one inside."""
    inside = getattr(optimizer, "inner_optimizer", None)
    return [optimizer] if inside is None else [optimizer, inside]


def _of_other_keras(given: Any) -> str:
    """What to do about an optimizer of the Keras that this process does not train with."""
    package = type(given).__module__.partition(".")[0]
    if package == "tf_keras" and not IS_KERAS_2:
        return (
            " That is one of Keras 2: set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported, "
            "and tf_gradcomp works with tf_keras."
        )
    if package == "keras" and IS_KERAS_2:
        return (
            " tf.keras is Keras 2 here: use tf.keras.optimizers; or, to train with Keras 3, do "
            "not set TF_USE_LEGACY_KERAS."
        )
    return ""


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
    """A value in a config without what Keras notes there of objects that occur twice in a file."""
    if isinstance(value, Mapping):
        return {str(k): _without_ids(v) for k, v in value.items() if k != "shared_object_id"}
    return [*map(_without_ids, value)] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """What a value in a config is, for JSON."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    config = value.get_config() if hasattr(value, "get_config") else {}
    return {"class": type(value).__name__, **config}


def check_not_by_horovod(optimizer: type) -> None:
    """Refuses what `hvd.DistributedOptimizer` has made of an optimizer's class.

    Raises:
        ValueError: With the reason and the way out.
    """
    if hasattr(optimizer, "register_local_var"):
        raise ValueError(
            "CompressedOptimizer exchanges gradients itself, and does not work inside or around "
            f"hvd.DistributedOptimizer: {_WHAT_HOROVOD_DOES}, and its compression argument can "
            "keep no residual. Use "
            'gc.CompressedOptimizer(optimizer, compressor, group="horovod") alone.'
        )


_MOMENTS_ARE_TAKEN = "_moments_are_taken"


def take_moments(optimizer: Any) -> None:
    """Says of an optimizer that its second moments stand still: its wrapper keeps others."""
    setattr(optimizer, _MOMENTS_ARE_TAKEN, True)


def check_moments_are_its_own(optimizer: Any) -> None:
    """Refuses an optimizer of which `take_moments` was said.

    Raises:
        ValueError: With the reason and the way out.
    """
    if hasattr(optimizer, _MOMENTS_ARE_TAKEN):
        raise ValueError(
            f"{type(optimizer).__name__} was wrapped in a CompressedOptimizer that keeps its "
            "second moments. Its own stand still, and its steps would be much too long, alone or "
            "in another CompressedOptimizer. Use a new optimizer. To carry the state over, save "
            "it with the first CompressedOptimizer (model.save_weights) and load it into another: "
            "see docs/checkpoints.md."
        )


_OF_INNER = (
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "weight_decay",
    "use_ema",
    "ema_overwrite_frequency",
    "gradient_accumulation_steps",
)


def check_set_on_inner(wrapper: Any, inside: Sequence[Any], made_with: Collection[str]) -> None:
    """Refuses settings of the wrapper itself, which has no use for them.

    Args:
        wrapper: The wrapper.
        inside: The optimizers inside: a loss scaler, if there is one, and what updates.
        made_with: The attributes that the wrapper had when it was made; all, where a class of the
            user's has others.

    Raises:
        ValueError: If one is set, with what to do.
    """
    useless = [name for name in _OF_INNER if getattr(wrapper, name, None)]
    later = [name for name in vars(wrapper) if name not in made_with and name[0] != "_"]
    # Such as momentum; but not methods, which one may replace by one's own.
    of_inside = [name for name in later if any(hasattr(one, name) for one in inside)]
    useless += [name for name in of_inside if not hasattr(type(wrapper), name)]
    if useless:
        raise ValueError(
            f"CompressedOptimizer: {', '.join(useless)} was set on the wrapper, where it has no "
            f"effect; set it on the optimizer inside: optimizer.inner_optimizer.{useless[0]} = ..."
        )


_LEAST_EPSILON_1 = 1e-15


def loses_zeros(optimizer: Any) -> bool:
    """Whether an optimizer makes NaN of zeros, as a sparse method leaves them in whole rows.

    Of a gradient without anything in a row and in a column, Keras' Adafactor estimates the square
    as about the square of its `epsilon_1`, which vanishes in float32 with the default of 1e-30.
    """
    adafactor = getattr(keras.optimizers, "Adafactor", ())
    return isinstance(optimizer, adafactor) and optimizer.epsilon_1 < _LEAST_EPSILON_1


def check_keeps_zeros(
    optimizer: Any, compressor: Compressor, specs: Sequence[GradientSpec], replicas: int
) -> None:
    """Refuses an optimizer of which `loses_zeros` is true behind a sparse method.

    Args:
        optimizer: What applies the gradients.
        compressor: What they are exchanged by.
        specs: What is known of them. Adafactor has no rows and columns of vectors.
        replicas: How many there are; one exchanges nothing.

    Raises:
        ValueError: With the reason and the way out.
    """
    matrices = [spec for spec in specs if len(spec.shape) > 1]
    if replicas == 1 or not matrices or not loses_zeros(optimizer):
        return
    for stage in in_turn(compressor):
        method = getattr(stage, "method", stage)
        if not isinstance(method, HasSettings) or method.delays_unless is None:
            continue
        if all(setting == method.delays_unless for setting in method.settings(matrices)):
            continue
        raise ValueError(
            f"{type(optimizer).__name__} makes NaN of gradients that are zero in a whole row and "
            f"column, and {method.name!r} leaves them so until they are sent. Use "
            f"epsilon_1={_LEAST_EPSILON_1} or more, 'cast' or 'qsgd', or another optimizer."
        )


def check_unchanged(before: Preconditioner | None, now: Preconditioner | None) -> None:
    """Refuses other settings of second moments than those that the wrapper was made for.

    Raises:
        ValueError: With the reason and the way out.
    """
    if _as_float32(before) != _as_float32(now):  # which variables of Keras 2's are
        raise ValueError(
            "The inner optimizer's beta_2, epsilon or amsgrad was changed after it was wrapped in "
            f"a CompressedOptimizer, which divides gradients by the earlier ones: {before} then, "
            f"{now} now. Set them before, and wrap it then."
        )


def _as_float32(preconditioner: Preconditioner | None) -> Preconditioner | None:
    if preconditioner is None:
        return None
    beta_2, epsilon = map(np.float32, (preconditioner.beta_2, preconditioner.epsilon))
    return dataclasses.replace(preconditioner, beta_2=float(beta_2), epsilon=float(epsilon))


def check_not_inside(optimizer: Any, applying: Any) -> None:
    """Refuses an optimizer by which another one applies gradients that are sums already.

    Args:
        optimizer: The one that is about to reduce.
        applying: The inner optimizer that applies sums now; None if none does.

    Raises:
        ValueError: With the reason and the way out.
    """
    if applying is not None:
        outer, inner = type(applying).__name__, type(optimizer).__name__
        raise ValueError(
            f"CompressedOptimizer: its inner optimizer, {outer}, applies gradients by another one, "
            f"{inner}, which would sum them over the replicas once more. Put {outer} around it: "
            f"{outer}(CompressedOptimizer({inner}(...)))."
        )


def check_group(group: Group) -> None:
    """Refuses groups whose replicas do not run here, or exchange their gradients already."""
    group.check_current()
    if isinstance(group, StrategyGroup) and getattr(group.strategy, "compressor", None) is not None:
        raise ValueError(
            "A compressor is set on both the strategy and the optimizer, and gradients would be "
            "compressed twice; give it to one: MultiWorkerMirroredStrategy(compressor=None), or "
            "the optimizer without CompressedOptimizer."
        )


def check_no_overwriting(variables: Sequence[keras.Variable], replicas: int) -> None:
    """Refuses variables, where there are several replicas, whose gradients are new values."""
    overwritten = [v.path for v in variables if getattr(v, "overwrite_with_gradient", False)]
    if overwritten and replicas > 1:
        raise ValueError(
            f"The gradients of {', '.join(overwritten)} are new values for these variables, as of "
            "float8 layers, and replicas cannot add them up; train on one replica, or with another "
            "dtype policy than float8."
        )


TRAINING = (
    "exchanging gradients for the first time",
    "give all ranks those of rank 0, by gc.callbacks.BroadcastInitialState() in fit, or "
    "gc.broadcast_initial_state(model).",
)
SAVING = (
    "collecting state to save",
    "some ranks alone have changed them since training began, as ReduceLROnPlateau does by a "
    "metric, which is another one on each rank: average what a callback acts on.",
)


def agree_on_values(
    group: Group,
    weights: Sequence[keras.Variable],
    slots: Sequence[keras.Variable],
    purpose: tuple[str, str],
    seconds: float | None = None,
) -> None:
    """Compares the values of variables over all ranks; refuses to go on where they differ.

    Args:
        group: The ranks.
        weights: Of the model.
        slots: Of the inner optimizer, whose names have a number that each rank counts by itself.
        purpose: `TRAINING` or `SAVING`: what comes next, and what to do if values differ.
        seconds: As for `Group.agree`.

    Raises:
        WorkersDisagreeError: On every rank, naming the variables and the way out; or as
            `Group.agree`.
    """
    values = {f"value of {path_of(v)!r}": _checksum(v) for v in weights}
    values |= {f"value of the optimizer's variable {i}": _checksum(v) for i, v in enumerate(slots)}
    action, advice = purpose
    try:
        group.agree({"next action": action, **values}, seconds)
    except WorkersDisagreeError as error:
        raise WorkersDisagreeError(f"{error} If only values differ: {advice}") from error


def _checksum(variable: keras.Variable) -> int:
    return zlib.crc32(np.asarray(variable).tobytes())


def check_created_in_scope(step_counter: keras.Variable) -> None:
    """Refuses an inner optimizer that is not of the strategy in scope."""
    extended = tf.distribute.get_strategy().extended
    if not extended.variable_created_in_scope(native(step_counter)):
        raise ValueError(
            "CompressedOptimizer: the inner optimizer was created outside of the strategy's scope, "
            "and replicas would share its state; create it inside `with strategy.scope():`."
        )


def check_metrics_created_in_scope(
    strategy: tf.distribute.Strategy, metrics: Iterable[Any]
) -> None:
    """Refuses metrics that are not the strategy's: callbacks would act on each worker's own.

    Raises:
        ValueError: Naming one of them.
    """
    for variable in itertools.chain.from_iterable(metric.variables for metric in metrics):
        if not strategy.extended.variable_created_in_scope(native(variable)):
            raise ValueError(
                f"{path_of(variable)!r} of a metric was created outside of the strategy's scope, "
                "and each worker would have its own; create metrics, and call model.compile, "
                "inside `with strategy.scope():`."
            )


def given_variables(variables: Sequence[keras.Variable] | None) -> Sequence[keras.Variable]:
    """The variables, which must be given before the optimizer is built."""
    if variables is None:
        raise ValueError(
            "CompressedOptimizer: gradients were given without variables before the optimizer was "
            "built; call optimizer.build(variables) first."
        )
    return variables


def check_one_for_each(grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Refuses other numbers of gradients than of variables."""
    if len(grads) != len(variables):
        raise ValueError(
            f"CompressedOptimizer: received {len(grads)} gradients for {len(variables)} variables; "
            "expected one gradient, or None, for each variable."
        )


def check_built(optimizer: Any) -> None:
    """Refuses to set weights of an optimizer that has none yet."""
    if not optimizer.built:
        raise ValueError(
            "CompressedOptimizer: call build(model.trainable_variables) before set_weights."
        )


def check_shapes(variables: Sequence[Any], weights: Sequence[Any]) -> None:
    """Refuses weights of other shapes than those of the variables that they are for."""
    for variable, value in zip(variables, weights, strict=True):
        if tuple(variable.shape) != np.shape(value):
            raise ValueError(
                f"CompressedOptimizer: {variable.name} has shape {tuple(variable.shape)}; "
                f"received {np.shape(value)}."
            )


def checked_replica_context() -> tf.distribute.ReplicaContext:
    """The context of the replica that calls; refuses a call from anywhere else."""
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError("apply() must be called in a replica context, inside strategy.run.")
    return context
