"""Converts restored state for a job with other settings than the job that saved it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_gradcomp.adam.handover import HandOver, InnerState
from tf_gradcomp.chief import is_chief
from tf_gradcomp.compressors.base import GRADIENT_UNITS, RESIDUAL
from tf_gradcomp.exchange.calls import call_in_python
from tf_gradcomp.exchange.gradients import Gradients, all_finite
from tf_gradcomp.exchange.replica import Replica
from tf_gradcomp.exchange.setup import Setup
from tf_gradcomp.private import tensorflow as tf_private

_NOT_ADAM = (
    "The checkpoint holds Adam's second moments, and residuals that are divided by their roots; "
    "this job's inner optimizer is not of the Adam family and cannot use either. Use the "
    "optimizer that wrote the checkpoint, or restore only the model's weights."
)

_LOST = (
    "The checkpoint was written by a job with a residual, and %r keeps none: gradients that were "
    "not sent yet are lost. To send them, continue with the compressor that wrote the checkpoint, "
    "or with gc.compressors.Auto([both])."
)
_LOG = tf.get_logger()


def warn_of_lost_residuals(setup: Setup, local_replica: int, warned: Callable[[], bool]) -> None:
    """Warns on the chief, in a step that finds residuals restored for a method that keeps none.

    `warned` returns whether the user was warned when the file was loaded.
    """
    if RESIDUAL in setup.variables.state:
        return
    waits = setup.group.local(setup.variables.facts.has_residual, local_replica)
    warns = local_replica == 0 and is_chief()

    def log() -> None:
        if not warned():
            _LOG.warning(_LOST, setup.compressor)

    def warn() -> None:
        if warns:
            tf.numpy_function(log, [], [])
        waits.assign(tf.zeros_like(waits))

    # XLA cannot call Python: its code sees only state that was restored before the trace.
    with tf.init_scope() if tf_private.in_xla() else contextlib.nullcontext():
        tf.cond(tf.reduce_any(waits), warn, lambda: None)


def convert_restored(
    replicas: Sequence[Replica],
    inner: InnerState | None,
    preconditioned: Sequence[int],
    *,
    by_python: bool,
) -> tf.Tensor:
    """Converts restored state if the job that saved it had other settings.

    Args:
        replicas: The replicas of this process.
        inner: The inner optimizer's state, if it has second moments.
        preconditioned: The positions of the gradients that are divided from now on.
        by_python: Whether a graph may call Python to convert, which XLA cannot.

    Returns:
        A tensor that is computed once the state is converted, because TensorFlow does not order
        Python's writes before the reads of a graph.
    """
    first, *_ = replicas
    setup = first.setup
    facts, every = setup.variables.facts, range(len(first.indices))
    takes = [setup.preconditioner is not None and index in preconditioned for index in every]
    scale = first.residual_scale
    taken, scales = first.fact(facts.moments_taken), first.fact(facts.residual_scale)
    convert_gradients = functools.partial(_convert_gradients_state, replicas, inner, takes)

    def convert() -> tf.Tensor:
        if inner is None:
            _refuse_divided(first)
        updates = tf.constant(0, tf.int64) if inner is None else inner.updates
        arguments, result = (scale / scales, taken, updates), tf.TensorSpec(len(takes), tf.int64)
        if by_python:
            since = call_in_python(setup.group, convert_gradients, arguments, result)
        else:
            since = convert_gradients(*arguments)
        with tf.control_dependencies([since]):
            for replica in replicas:
                for name in setup.job_state_in_gradient_units:
                    measured = replica.local(setup.variables.job_state[name])
                    measured.assign(tf.zeros_like(measured))
                replica.set_fact(facts.moments_taken, takes, every)
                replica.set_fact(facts.moments_since, since, every)
                replica.set_fact(facts.residual_scale, [scale] * len(takes), every)
            return tf.constant(True)

    is_right = tf.logical_and(
        tf.reduce_all(tf.equal(taken, takes)), tf.reduce_all(tf.equal(scales, scale))
    )
    return tf.cond(is_right, lambda: tf.constant(False), convert)


def take_residuals(
    replica: Replica,
    gradients: Gradients,
    scale: tf.Tensor | float = 1.0,
    inner: InnerState | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Returns gradients plus a replica's residuals, which become zeros.

    Args:
        replica: The replica.
        gradients: All gradients of the replica.
        scale: The number by which the gradients will be divided, such as a loss scale.
        inner: If an earlier job kept second moments on its replicas, this optimizer gets them back.
    """
    converted = convert_restored([replica], inner, [], by_python=False)
    positions = range(len(replica.indices))
    with tf.control_dependencies([converted]):
        gradients, remaining = replica.add_residuals(positions, gradients, scale)
        replica.write_residuals(positions, [], all_finite(gradients), remaining)
    return gradients


def _convert_gradients_state(
    replicas: Sequence[Replica],
    inner: InnerState | None,
    takes: Sequence[bool],
    factors: tf.Tensor,
    taken: tf.Tensor,
    updates: tf.Tensor,
) -> tf.Tensor:
    """Converts the state of each gradient; returns its new `moments_since`, int64.

    `takes` marks the gradients that are divided from now on, and `taken` the gradients that were
    divided when the state was saved. Each residual is multiplied by its factor.
    """
    since: Sequence[tf.Tensor | int] = [0] * len(takes)
    if inner is not None and _is_fresh(replicas[0], inner, taken, updates):
        return tf.constant(since, tf.int64)
    if inner is not None:
        inner = dataclasses.replace(inner, updates=updates)
        since = _move_moments(replicas, inner, taken, takes)
    tensor_factors = tf.unstack(factors, len(takes))
    for replica in replicas:
        for residual, factor in zip(
            replica.state().get(RESIDUAL, ()), tensor_factors, strict=False
        ):
            if not _is_known(tf.equal(factor, 1)):
                residual.assign(residual.read_value() * factor)
    return tf.stack([tf.cast(step, tf.int64) for step in since])


def _is_fresh(replica: Replica, inner: InnerState, taken: tf.Tensor, updates: tf.Tensor) -> bool:
    """Whether a job is known to begin, so that all state is zeros."""
    has_state = tf.logical_or(taken, replica.fact(replica.setup.variables.facts.has_residual))
    if not _is_known(
        tf.logical_and(tf.equal(updates, 0), tf.logical_not(tf.reduce_any(has_state)))
    ):
        return False
    moments = [
        moment for moments_by_variable in inner.moments.values() for moment in moments_by_variable
    ]
    return not any(np.any(moment.read_value().numpy()) for moment in moments)


def _is_known(fact: tf.Tensor) -> bool:
    """Whether a fact is known to be true; in a graph, no fact is known.

    Correct state stays untouched, because a graph may use it while Python converts the rest.
    """
    return tf.executing_eagerly() and bool(fact)


def _refuse_divided(replica: Replica) -> None:
    """Raises for restored residuals that were divided by second moments that this job lacks."""
    # XLA drops assertions: its code sees only state that was restored before the trace.
    with tf.init_scope() if tf_private.in_xla() else contextlib.nullcontext():
        taken = replica.fact(replica.setup.variables.facts.moments_taken)
        tf.debugging.assert_none_equal(taken, True, message=_NOT_ADAM)


def _move_moments(
    replicas: Sequence[Replica], inner: InnerState, taken: tf.Tensor, takes: Sequence[bool]
) -> list[tf.Tensor | int]:
    """Returns the new `moments_since` of each gradient."""
    handover = _handover(replicas, inner)
    since: list[tf.Tensor | int] = []
    for index, is_taken in enumerate(tf.unstack(taken, len(takes))):
        if _is_known(tf.equal(is_taken, takes[index])):
            since.append(handover.since[index] if takes[index] else 0)
        elif takes[index]:
            since.append(handover.to_replicas(index, tf.logical_not(is_taken)))
        else:
            handover.to_inner(index, is_taken)
            since.append(0)
    return since


def _handover(replicas: Sequence[Replica], inner: InnerState) -> HandOver:
    states, setup = [replica.state() for replica in replicas], replicas[0].setup
    preconditioner = setup.method.moments
    if preconditioner is None:
        raise RuntimeError("Without second moments, there is no state to hand over.")
    return HandOver(
        preconditioner,
        inner,
        states,
        [state[name] for state in states for name in GRADIENT_UNITS if name in state],
        *_delayed(replicas),
        replicas[0].fact(setup.variables.facts.moments_since),
        setup.group.size,
    )


def _delayed(replicas: Sequence[Replica]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns the restored residuals, summed over the replicas, and which residuals are lost."""
    first, setup = replicas[0], replicas[0].setup
    facts, shapes = setup.variables.facts, [setup.specs[n].shape for n in first.indices]
    if RESIDUAL not in setup.variables.state:
        return [tf.zeros(shape) for shape in shapes], first.fact(facts.has_residual)
    residuals_by_tensor = zip(*(replica.state()[RESIDUAL] for replica in replicas), strict=True)
    totals = [
        tf.add_n([residual.read_value() for residual in residuals])
        for residuals in residuals_by_tensor
    ]
    scale = setup.group.size / len(replicas) / first.fact(facts.residual_scale)
    factors = tf.unstack(scale, len(shapes))
    delayed = [total * factor for total, factor in zip(totals, factors, strict=True)]
    return delayed, tf.zeros([len(shapes)], tf.bool)
