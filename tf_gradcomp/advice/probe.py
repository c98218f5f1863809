"""Predicts the exchanges of several methods in a job, before its first step."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_gradcomp.advice.collectives import Collectives
from tf_gradcomp.advice.cost_model import Curve, Kind, Prediction, predict
from tf_gradcomp.advice.sample import Sample
from tf_gradcomp.compressors.registry import text_of
from tf_gradcomp.distribute.communicator import Communicator
from tf_gradcomp.distribute.group import Group
from tf_gradcomp.distribute.method import Candidate
from tf_gradcomp.policy import GradientSpec


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
    group: Group,
    specs: Sequence[GradientSpec],
    candidates: Sequence[Candidate],
    effort: Effort,
) -> Probed:
    """Times methods and collectives; all workers of a job call it.

    Args:
        group: One with a network between its replicas.
        specs: Of the gradients of a step.
        candidates: What to predict.
        effort: How much to try.

    Raises:
        ValueError: If it has none.
    """
    communicators = group.communicators()
    # A thread of its own is in no scope of a strategy, which would replicate all variables.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_probe, group, communicators, specs, candidates, effort).result()


def _probe(
    group: Group,
    communicators: Sequence[Communicator],
    specs: Sequence[GradientSpec],
    candidates: Sequence[Candidate],
    effort: Effort,
) -> Probed:
    with tf.device("CPU:0"):
        collectives = Collectives(group, communicators)
        sample = Sample(specs, collectives.rank, collectives.size, effort.elements)
        works = [sample.work(*candidate, group.largest) for candidate in candidates]
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
