"""Parts of a step of `CompressedOptimizer` besides the exchange: scales, averages, local steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gradcomp.exchange.gradients import divided, native
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras.common.compressed import Compressed
from tf_gradcomp.keras.common.inner import in_loss_scaler
from tf_gradcomp.keras.common.wrappers import built_wrappers, compressed_in
from tf_gradcomp.keras.local.rounds import Rounds
from tf_gradcomp.private import keras3 as keras_private
from tf_gradcomp.strategy.strategy import MultiWorkerMirroredStrategy


def unscaled(
    grads: Sequence[tf.Tensor | tf.IndexedSlices],
    scaler: keras.optimizers.LossScaleOptimizer | None,
    factor: float | None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Undoes a loss scaler's dynamic scale and an optimizer's static `loss_scale_factor`."""
    if scaler is not None:
        grads = [divided(gradient, scaler.dynamic_scale.value) for gradient in grads]
    if factor is not None:
        grads = [divided(gradient, factor) for gradient in grads]
    return list(grads)


def update_loss_scale(scaler: keras.optimizers.LossScaleOptimizer, finite: tf.Tensor) -> None:
    """Keras' rule for all replicas: halves the scale, or doubles it after enough steps."""
    scale, counter = scaler.dynamic_scale, scaler.step_counter
    grows = tf.equal(counter.value, scaler.dynamic_growth_steps - 1)
    factor = tf.where(finite, tf.where(grows, 2.0, 1.0), 0.5)
    scale.assign(scale.value * factor)
    counts = tf.logical_and(finite, tf.logical_not(grows))
    counter.assign(tf.where(counts, counter.value + 1, 0))


def check_no_scaler_inside(multi_optimizer: Any) -> None:
    """Refuses a wrapper around a loss scaler if nothing scales the loss for it."""
    for optimizer in getattr(multi_optimizer, "optimizers", ()):
        if isinstance(optimizer, Compressed) and in_loss_scaler(optimizer.inner_optimizer)[1:]:
            raise ValueError(
                "CompressedOptimizer: a MultiOptimizer does not multiply the loss by the scales of "
                "its optimizers, so it cannot contain a LossScaleOptimizer. Put a "
                "LossScaleOptimizer around the MultiOptimizer: "
                "LossScaleOptimizer(MultiOptimizer(...))."
            )


def finite_on_all(scaler: keras.optimizers.LossScaleOptimizer, finite: tf.Tensor) -> tf.Tensor:
    """Returns whether `finite` is true on all replicas, of a wrapper inside or of our strategy."""
    compressed = next(built_wrappers(scaler), None)
    if compressed is not None:
        exchange = compressed.exchange
        return _true_on_all(exchange.group.all_replicas, finite, f"{exchange.setup.label}_flag")
    context = tf.distribute.get_replica_context()
    if context is None or not isinstance(context.strategy, MultiWorkerMirroredStrategy):
        return finite
    return _true_on_all(StrategyGroup(context.strategy), finite, "finite")


def _true_on_all(group: Group, flag: tf.Tensor, label: str) -> tf.Tensor:
    """Whether a bool scalar is true on all replicas; each replica calls it."""
    if group.size == 1:
        return flag
    false = tf.cast(tf.logical_not([flag]), tf.int32)
    return tf.equal(group.communicator(label).all_reduce(false)[0], 0)


def overwrite_if_due(
    strategy: tf.distribute.Strategy,
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    updates: Any,
    otherwise: Callable[[], None] = lambda: None,
) -> None:
    """Overwrites weights and applies their constraints, if this is due after `updates`."""
    if not (optimizer.use_ema and optimizer.ema_overwrite_frequency):
        otherwise()
        return

    def overwrite() -> None:
        keras_private.overwrite_by_averages(optimizer)
        strategy.extended.call_for_each_replica(constrain, args=(variables,))

    due = tf.equal(tf.cast(updates, tf.int64) % optimizer.ema_overwrite_frequency, 0)
    tf.cond(due, overwrite, otherwise)


def constrain(variables: Sequence[keras.Variable]) -> None:
    """Applies the constraints of variables."""
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))


def _averaging(optimizer: Any) -> Iterator[Any]:
    """The optimizers, at any depth, that keep averages of weights."""
    inside = getattr(optimizer, "inner_optimizer", None)
    within = [inside] if inside is not None else getattr(optimizer, "optimizers", None)
    if within is not None:
        for inner in within:
            yield from _averaging(inner)
    elif optimizer.use_ema:
        yield optimizer


def swap_averages(
    optimizer: Any, swap: Callable[[Any], None], original: Callable[[], None]
) -> None:
    """Replaces Keras' search for averages, which finds none in a wrapper inside another object."""
    averaging = list(_averaging(optimizer))
    if not averaging or not any(compressed_in(optimizer)):
        original()
        return
    for averaged in averaging:
        swap(averaged)


def check_no_constraints(variables: Sequence[keras.Variable]) -> None:
    """Refuses variables with constraints."""
    constrained = [v.path for v in variables if v.constraint is not None]
    if constrained:
        raise ValueError(
            f"CompressedOptimizer: {', '.join(constrained)} has a constraint, and under a strategy "
            "Keras averages the weights of all workers before it constrains them; leave out "
            "local_steps or the constraint."
        )


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

    def take(gradients: Sequence[Any], their_variables: Sequence[keras.Variable]) -> None:
        with keras_private.applying_at_once(core):
            strategy.extended.call_for_each_replica(core.apply, args=(gradients, their_variables))

    def locally() -> None:
        finite = rounds.step(rounds.sum_over_replicas(grads), variables, take)
        if core.gradient_accumulation_steps:
            tf.cond(finite, lambda: None, lambda: restart_accumulation(core))
        if scaler is not None:
            update_loss_scale(scaler, finite)

    def synchronously() -> None:
        rounds.count_step()
        synchronous(strategy, scaler, grads, variables)

    if isinstance(strategy, MultiWorkerMirroredStrategy):
        strategy.periodic_reduce.append(rounds.exchanges)
    if rounds.warmup_steps:
        tf.cond(rounds.in_warmup(), synchronously, locally)
    else:
        locally()


def updates(core: keras.optimizers.Optimizer, group: Group) -> tf.Tensor:
    """Returns the inner optimizer's number of updates, on a replica of the process; int64."""
    count = group.local(native(keras_private.step_counter(core)), 0)
    return tf.cast(count, tf.int64) // (core.gradient_accumulation_steps or 1)


def is_update(core: keras.optimizers.Optimizer) -> tf.Tensor:
    """Whether the inner optimizer's next step updates, or only accumulates gradients."""
    steps = core.gradient_accumulation_steps or 1
    return tf.equal((keras_private.step_counter(core).value + 1) % steps, 0)


def restart_accumulation(core: keras.optimizers.Optimizer) -> None:
    """Resets the inner optimizer's count after a step without an update."""
    steps = core.gradient_accumulation_steps
    if steps:
        keras_private.step_counter(core).assign_sub(steps - 1)
