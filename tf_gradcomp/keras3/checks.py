"""What `CompressedOptimizer` refuses, with the reason and the way out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gradcomp.distribute.group import current_group


def checked_inner(
    inner: keras.optimizers.Optimizer | Mapping[str, Any] | str, wrapper: type
) -> keras.optimizers.Optimizer:
    """The inner optimizer that was given.

    Args:
        inner: An optimizer, its config or its name.
        wrapper: The class that wraps it, and must not do so twice.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it cannot be wrapped.
    """
    if not isinstance(inner, (keras.optimizers.Optimizer, Mapping, str)):
        raise TypeError(
            "CompressedOptimizer: expected a Keras 3 optimizer such as keras.optimizers.Adam(), "
            f"its config or its name; received {inner!r}."
        )
    optimizer = keras.optimizers.get(dict(inner) if isinstance(inner, Mapping) else inner)
    inside = optimizer
    if isinstance(inside, keras.optimizers.LossScaleOptimizer):
        inside = inside.inner_optimizer
    if isinstance(inside, wrapper):
        raise ValueError(
            "CompressedOptimizer: the inner optimizer is compressed already; wrap it once."
        )
    if isinstance(inside, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise ValueError(
            "CompressedOptimizer: each optimizer in a MultiOptimizer reduces gradients by itself, "
            "so one around all of them would reduce twice. Wrap each of those inside: "
            "MultiOptimizer(OptimizerMap(CompressedOptimizer(Adam()), {...}))."
        )
    return optimizer


def facts_of(label: str, optimizer: keras.optimizers.Optimizer) -> dict[str, str]:
    """An optimizer's settings, as text that is the same on all workers with the same program."""
    settings = {"class": type(optimizer).__name__, **optimizer.get_config()}
    facts = {
        f"{label}'s {name}": json.dumps(
            keras.saving.serialize_keras_object(value),
            sort_keys=True,
            default=lambda other: type(other).__name__,
        )
        for name, value in settings.items()
        if name not in ("name", "inner_optimizer")  # names have numbers, counted by each process
    }
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        facts |= facts_of("loss-scaled optimizer", optimizer.inner_optimizer)
    return facts


def check_current_strategy() -> None:
    """Refuses strategies under which gradients are not exchanged, or are so already."""
    group = current_group()  # refuses the former
    if getattr(group.strategy, "compressor", None) is not None:
        raise ValueError(
            "A compressor is set on both the strategy and the optimizer, and gradients would be "
            "compressed twice; give it to one: MultiWorkerMirroredStrategy(compressor=None), or "
            "the optimizer without CompressedOptimizer."
        )


def check_no_overwriting(variables: Sequence[keras.Variable]) -> None:
    """Refuses variables, where there are several replicas, whose gradients are new values."""
    overwritten = [v.path for v in variables if getattr(v, "overwrite_with_gradient", False)]
    if overwritten and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise ValueError(
            f"CompressedOptimizer: the gradients of {', '.join(overwritten)} are new values for "
            "these variables, as of float8 layers, and replicas cannot add them up; train on one "
            "replica, or with another dtype policy than float8."
        )


def check_created_in_scope(step_counter: keras.Variable) -> None:
    """Refuses an inner optimizer that is not of the strategy in scope."""
    extended = tf.distribute.get_strategy().extended
    if not extended.variable_created_in_scope(step_counter.value):
        raise ValueError(
            "CompressedOptimizer: the inner optimizer was created outside of the strategy's scope, "
            "and replicas would share its state; create it inside `with strategy.scope():`."
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


def checked_replica_context() -> tf.distribute.ReplicaContext:
    """The context of the replica that calls; refuses a call from anywhere else."""
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError("apply() must be called in a replica context, inside strategy.run.")
    return context
