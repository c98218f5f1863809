"""The exchange of learners in one process."""

from __future__ import annotations

from tf_gradcomp import compressors
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.setup import Candidate, Method
from tf_gradcomp.groups.lockstep import LockstepGroup
from tf_gradcomp.keras.common.precondition import preconditioner_for
from tf_gradcomp.keras.common.version import keras
from tf_gradcomp.policy import LayerPolicy


def new_exchange(
    model: keras.Model,
    learners: int,
    method: compressors.Compressor,
    policy: LayerPolicy | None,
    precondition: str | None,
) -> GradientExchange:
    """Returns the exchange of all learners, built for the model's trainable variables."""
    preconditioner = None
    if learners > 1:
        preconditioner = preconditioner_for(model.optimizer, method, precondition)
    chosen, group = Candidate(method, preconditioner), LockstepGroup(learners)
    one = Method(repr(method), [chosen], moments=preconditioner)
    exchange = GradientExchange(one, policy, lambda: group)
    exchange.build(model.trainable_variables)
    return exchange
