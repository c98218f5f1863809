"""Predicts the exchanges of several methods in a job, before its first step."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.advice.collectives import Collectives
from tf_gradcomp.advice.cost_model import Curve, Kind, Prediction, predict
from tf_gradcomp.advice.sample import Sample
from tf_gradcomp.compressors.base import Compressor
from tf_gradcomp.compressors.registry import text_of
from tf_gradcomp.distribute import tf_private
from tf_gradcomp.policy import GradientSpec


class Candidate(NamedTuple):
    """A method, and what is in front of it."""

    compressor: Compressor
    preconditioner: Preconditioner | None = None


class Effort(NamedTuple):
    """How much a probe tries.

    Attributes:
        elements: Of the gradients, about so many at most; a larger model takes in proportion.
        seconds: Of a collective, behind which none larger is tried.
    """

    elements: int
    seconds: float


QUICK = Effort(2_000_000, 0.05)  # about a second, to choose a method
THOROUGH = Effort(8_000_000, 0.5)  # to say how long a step will take


class Probed(NamedTuple):
    """What a job's probe found: equal on all workers.

    Attributes:
        predictions: Of the candidates, in their order, without computing.
        curves: Of all kinds of collectives that they need.
    """

    predictions: list[Prediction]
    curves: dict[Kind, Curve]


def probe(
    strategy: tf.distribute.Strategy,
    specs: Sequence[GradientSpec],
    candidates: Sequence[Candidate],
    effort: Effort,
) -> Probed:
    """Times methods and collectives; all workers of a job call it.

    Args:
        strategy: One whose replicas talk by TensorFlow's collectives.
        specs: Of the gradients of a step.
        candidates: What to predict.
        effort: How much to try.

    Raises:
        ValueError: If they do not.
    """
    if not tf_private.is_collective(strategy):
        raise ValueError(
            f"Under {type(strategy).__name__} there is no network whose collectives could be timed "
            "to choose a compressor; use gc.MultiWorkerMirroredStrategy, or name a compressor."
        )
    # A thread of its own is in no scope of a strategy, which would replicate all variables.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_probe, strategy, specs, candidates, effort).result()


def _probe(
    strategy: tf.distribute.Strategy,
    specs: Sequence[GradientSpec],
    candidates: Sequence[Candidate],
    effort: Effort,
) -> Probed:
    with tf.device("CPU:0"):
        collectives = Collectives(strategy)
        sample = Sample(specs, collectives.rank, collectives.size, effort.elements)
        works = [sample.work(*candidate, collectives.agree) for candidate in candidates]
        most: dict[Kind, float] = {}
        for work in works:
            for kind, sent_bytes in work.asked:
                most[kind] = max(sent_bytes, most.get(kind, 0.0))
        curves = {kind: collectives.curve(kind, most[kind], effort.seconds) for kind in most}
    predictions = [
        predict(text_of(candidate.compressor), work, curves)
        for candidate, work in zip(candidates, works, strict=True)
    ]
    return Probed(predictions, curves)
