"""Converts restored state for a job whose settings differ from those of the job that saved it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp import tf_private
from tf_gradcomp.adam.handover import HandOver, InnerState
from tf_gradcomp.compressors.base import OF_GRADIENTS, RESIDUAL
from tf_gradcomp.exchange.replica import Replica

_NOT_ADAM = (
    "The checkpoint holds Adam's second moments, and residuals that are divided by their roots; "
    "this job's inner optimizer is not of the Adam family and can go on with neither. Use the "
    "optimizer that wrote it, or restore the model's weights alone."
)


def convert_restored(
    replica: Replica, inner: InnerState | None, preconditioned: Sequence[int]
) -> None:
    """Converts restored state where the job that saved it had other settings.

    Args:
        replica: The replica whose state it is.
        inner: The state of the inner optimizer.
        preconditioned: Places of the gradients that are divided if this job divides any.
    """
    setup = replica.setup
    facts, every = setup.variables.facts, range(len(replica.numbers))
    takes = [setup.preconditioner is not None and place in preconditioned for place in every]
    scale = replica.residual_scale
    taken, scales = replica.fact(facts.moments_taken), replica.fact(facts.residual_scale)

    def convert() -> None:
        since: Sequence[tf.Tensor | int] = [0] * len(takes)
        if inner is None:
            _refuse_divided(replica)
        else:
            since = _move_moments(replica, inner, taken, takes)
        if residuals := replica.state().get(RESIDUAL):
            factors = tf.unstack(scale / scales, len(takes))
            for residual, factor in zip(residuals, factors, strict=True):
                residual.assign(residual.read_value() * factor)
        for name in setup.job_state_of_gradients:
            measured = replica.local(setup.variables.job_state[name])
            measured.assign(tf.zeros_like(measured))
        replica.set_fact(facts.moments_taken, takes, every)
        replica.set_fact(facts.moments_since, since, every)
        replica.set_fact(facts.residual_scale, [scale] * len(takes), every)

    right = tf.logical_and(
        tf.reduce_all(tf.equal(taken, takes)), tf.reduce_all(tf.equal(scales, scale))
    )
    tf.cond(right, lambda: None, convert)


def _refuse_divided(replica: Replica) -> None:
    """Refuses residuals that were divided by second moments which this job cannot have."""
    # XLA drops assertions: in its code only what was restored before it was traced is seen.
    with tf.init_scope() if tf_private.in_xla() else contextlib.nullcontext():
        taken = replica.fact(replica.setup.variables.facts.moments_taken)
        tf.debugging.assert_none_equal(taken, True, message=_NOT_ADAM)


def _move_moments(
    replica: Replica, inner: InnerState, taken: tf.Tensor, takes: Sequence[bool]
) -> list[tf.Tensor | int]:
    """Returns what `moments_since` is of each gradient from now on."""
    handover = _handover(replica, inner)
    since: list[tf.Tensor | int] = []
    for place, is_taken in enumerate(tf.unstack(taken, len(takes))):
        if takes[place]:
            since.append(handover.take(place, tf.logical_not(is_taken)))
        else:
            handover.give_back(place, is_taken)
            since.append(0)
    return since


def _handover(replica: Replica, inner: InnerState) -> HandOver:
    state, setup = replica.state(), replica.setup
    preconditioner = setup.method.moments
    if preconditioner is None:
        raise RuntimeError("There is nothing to hand over without second moments.")
    return HandOver(
        preconditioner,
        inner,
        {name: state[name] for name in inner.moments},
        [state[name] for name in OF_GRADIENTS if name in state],
        *_delayed(replica),
        replica.fact(setup.variables.facts.moments_since),
        setup.group.size,
    )


def _delayed(replica: Replica) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns restored residuals, of all replicas together, and which of them are lost."""
    setup = replica.setup
    facts, shapes = setup.variables.facts, [setup.specs[n].shape for n in replica.numbers]
    residuals = replica.state().get(RESIDUAL)
    if residuals is None:
        return [tf.zeros(shape) for shape in shapes], replica.fact(facts.residual_waits)
    factors = tf.unstack(setup.group.size / replica.fact(facts.residual_scale), len(shapes))
    pairs = zip(residuals, factors, strict=True)
    delayed = [residual.read_value() * factor for residual, factor in pairs]
    return delayed, tf.zeros([len(shapes)], tf.bool)
