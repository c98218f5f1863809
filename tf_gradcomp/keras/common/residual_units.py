"""The unit of residuals: gradients, or differences of weights."""

from __future__ import annotations

import tensorflow as tf

from tf_gradcomp.compressors.base import OF_GRADIENTS, RESIDUAL
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.state import shared_variable
from tf_gradcomp.groups.group import Group
from tf_gradcomp.private import tensorflow as tf_private


class ResidualUnits(tf.Module):
    """Records the unit of the residual of an exchange.

    Attributes:
        of_weights: bool, whether the residual is a difference of weights. Without local steps, and
            during their warm-up, the residual is a gradient.
        steps: int64, the number of training steps so far; 0 after a job without local steps.

    Args:
        group: The replicas.
        local: Whether the job takes local steps; a job without local steps refuses a residual of
            weights.
    """

    def __init__(self, group: Group, *, local: bool) -> None:
        super().__init__(name="residual_units")
        self.of_weights = group.create(
            lambda: shared_variable(False, tf.bool, "residual_of_weights")
        )
        self.steps = group.create(lambda: shared_variable(0, tf.int64, "steps_of_training"))
        if not local:
            tf_private.save_as(self.of_weights, lambda: tf.constant(False), refuse_weights)
            none = tf.constant(0, tf.int64)
            tf_private.save_as(self.steps, lambda: none, lambda steps: None)


def refuse_weights(of_weights: tf.Tensor) -> None:
    """Refuses the residual of a checkpoint if it is a difference of weights."""
    if bool(of_weights):
        raise ValueError(
            "The checkpoint holds the residual of a job with local steps, which is a difference "
            "of weights, not a gradient. Continue with gc.LocalSteps, or restore only the model's "
            "weights."
        )


def forget_earlier_gradients(exchange: GradientExchange, local_replica: int = 0) -> None:
    """Sets a replica's state from earlier gradients to zeros, except its residual.

    A change of units makes such state useless: TopK's velocity of gradients, for example, does not
    fit differences of weights.
    """
    replica = exchange.replica(local_replica)
    state, job_state = replica.state(), replica.job_state()
    kept = [job_state[name] for name in exchange.setup.job_state_of_gradients]
    for name in OF_GRADIENTS:
        kept += state.get(name, []) if name != RESIDUAL else []
    for variable in kept:
        variable.assign(tf.zeros_like(variable))
