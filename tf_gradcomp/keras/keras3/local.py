"""Local steps with optimizers of Keras 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gradcomp.exchange.gradients import native
from tf_gradcomp.groups.group import Group
from tf_gradcomp.keras.common.rounds import Rounds
from tf_gradcomp.keras.keras3.loss_scale import update_loss_scale
from tf_gradcomp.private import keras3 as keras_private
from tf_gradcomp.strategy.strategy import CheckedStrategy


def check_no_constraints(variables: Sequence[keras.Variable]) -> None:
    """Refuses variables with constraints."""
    constrained = [v.path for v in variables if v.constraint is not None]
    if constrained:
        raise ValueError(
            f"CompressedOptimizer: {', '.join(constrained)} has a constraint, and under a strategy "
            "Keras averages the weights of all workers before it constrains them; leave out "
            "local_steps or the constraint."
        )


def update_common(
    outer: keras.optimizers.Optimizer | None,
    strategy: tf.distribute.Strategy,
    means: Sequence[Any],
    variables: Sequence[keras.Variable],
) -> None:
    """Has the outer optimizer apply mean pseudo-gradients; without one, subtracts them."""
    if outer is not None:
        with keras_private.applying_at_once(outer):
            strategy.extended.call_for_each_replica(outer.apply, args=(means, variables))
        return
    for mean, variable in zip(means, variables, strict=True):
        own = strategy.experimental_local_results(mean)[0]
        for weight in strategy.experimental_local_results(native(variable)):
            weight.assign_sub(own)


def step(
    rounds: Rounds,
    core: keras.optimizers.Optimizer,
    synchronous: Callable[..., None],
    strategy: tf.distribute.Strategy,
    scaler: keras.optimizers.LossScaleOptimizer | None,
    grads: Sequence[Any],
    variables: Sequence[keras.Variable],
) -> None:
    """Takes a local step, or a synchronous one during the warm-up; called across replicas."""

    def take(own: Sequence[Any], their_variables: Sequence[keras.Variable]) -> None:
        with keras_private.applying_at_once(core):
            strategy.extended.call_for_each_replica(core.apply, args=(own, their_variables))

    def locally() -> None:
        finite = rounds.step(rounds.sum_over_replicas(grads), variables, take)
        if core.gradient_accumulation_steps:
            tf.cond(finite, lambda: None, lambda: restart_accumulation(core))
        if scaler is not None:
            update_loss_scale(scaler, finite)

    def synchronously() -> None:
        rounds.count_step()
        synchronous(strategy, scaler, grads, variables)

    if isinstance(strategy, CheckedStrategy):
        strategy.rare_exchanges.append(rounds.exchanges)
    if rounds.warmup_steps:
        tf.cond(rounds.in_warmup(), synchronously, locally)
    else:
        locally()


def updates(core: keras.optimizers.Optimizer, group: Group) -> tf.Tensor:
    """Returns the inner optimizer's number of updates, on a replica of the process; int64."""
    count = group.local(native(keras_private.step_counter(core)), 0)
    return tf.cast(count, tf.int64) // (core.gradient_accumulation_steps or 1)


def is_update(core: keras.optimizers.Optimizer) -> tf.Tensor:
    """Returns whether the inner optimizer's next step updates, or only accumulates gradients."""
    steps = core.gradient_accumulation_steps or 1
    return tf.equal((keras_private.step_counter(core).value + 1) % steps, 0)


def restart_accumulation(core: keras.optimizers.Optimizer) -> None:
    """Resets the inner optimizer's count after a step without an update."""
    steps = core.gradient_accumulation_steps
    if steps:
        keras_private.step_counter(core).assign_sub(steps - 1)
