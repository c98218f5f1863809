"""Which method exchanges: the one that was given, or one of its candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.advice import report
from tf_gradcomp.advice.probe import QUICK, Candidate, probe
from tf_gradcomp.compressors.base import Compressor
from tf_gradcomp.distribute.state import state_specs
from tf_gradcomp.policy import GradientSpec

Precondition = Callable[[Compressor], Preconditioner | None]

_LOG = tf.get_logger()  # beside TensorFlow's own messages about the strategy


def candidates_of(compressor: Compressor, precondition: Precondition) -> list[Candidate]:
    """The methods that may exchange, each with what is in front of it."""
    methods = compressor.candidates or (compressor,)
    return [Candidate(method, precondition(method)) for method in methods]


def choose(
    strategy: tf.distribute.Strategy,
    candidates: Sequence[Candidate],
    specs: Sequence[GradientSpec],
) -> Candidate:
    """The fastest of several by a probe; all replicas choose alike. The log says which."""
    if len(candidates) == 1:
        chosen = candidates[0]
        how = repr(chosen.compressor)
    else:
        predictions = probe(strategy, specs, candidates, QUICK).predictions
        exchanges = [prediction.exchange for prediction in predictions]
        chosen = candidates[exchanges.index(min(exchanges))]
        how = f"{chosen.compressor!r}, of which the probe predicted: {report.line(predictions)}"
    _LOG.info("%d replicas exchange gradients by %s.", strategy.num_replicas_in_sync, how)
    return chosen


def in_front_of_residuals(
    candidates: Sequence[Candidate], specs: Sequence[GradientSpec]
) -> Preconditioner | None:
    """By what residuals are divided, so that any of the candidates can go on with them.

    Raises:
        ValueError: If one could not.
    """
    if len(candidates) == 1:
        return candidates[0].preconditioner
    found = set()
    for compressor, preconditioner in candidates:
        if state_specs(compressor, specs):
            found.add(preconditioner)
        elif preconditioner:
            found.update({preconditioner, None})
    if len(found) > 1:
        raise ValueError(
            "Of the candidates, some are preconditioned for Adam and some are not, and could not "
            'go on with each other\'s residuals: use precondition=None, or precondition="auto" '
            "with candidates that send the largest entries or keep no residual."
        )
    return found.pop() if found else None
