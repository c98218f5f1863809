"""Predicts the exchanges of several methods in a job, before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_gradcomp.advice.collectives import Collectives
from tf_gradcomp.advice.cost_model import Curve, Kind, Prediction, predict
from tf_gradcomp.advice.sample import Sample
from tf_gradcomp.compressors.auto import CANDIDATES
from tf_gradcomp.compressors.registry import text_of
from tf_gradcomp.exchange.setup import Candidate
from tf_gradcomp.groups.communicator import Communicator
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.notices import out_of_scope
from tf_gradcomp.policy import EMBEDDING, GradientSpec


class Effort(NamedTuple):
    """The sizes of the gradients and collectives that a probe measures."""

    # The approximate maximum of measured gradient elements; the times of a larger model are scaled
    # up.
    elements: int
    seconds: float  # after a collective that takes this many seconds, no larger one is tried


QUICK = Effort(2_000_000, 0.05)  # about a second, to choose a method
THOROUGH = Effort(8_000_000, 0.5)  # to say how long a step will take


class Probed(NamedTuple):
    """The findings of a job's probe; equal on all workers."""

    # The predictions for the candidates, in their order, with 0 as `compute`.
    predictions: list[Prediction]
    # The measured times of all kinds of collectives that the candidates need.
    curves: dict[Kind, Curve]
    tables: Sequence[str] = ()  # the paths of embeddings, whose gradients it treated as dense


def probe(
    group: Group,
    specs: Sequence[GradientSpec],
    candidates: Sequence[Candidate],
    effort: Effort,
) -> Probed:
    """Times methods and collectives; all workers of a job call it.

    Raises:
        ValueError: If there is no network between the replicas, or TensorFlow's ops are
            deterministic, which forbids its clock.
    """
    communicators = group.communicators()
    try:
        return out_of_scope(lambda: _probe(group, communicators, specs, candidates, effort))
    except tf.errors.FailedPreconditionError as error:
        if "determinism" not in error.message:
            raise
        raise ValueError(
            "Methods cannot be timed under tf.config.experimental.enable_op_determinism(), which "
            "forbids TensorFlow's clock. Name a compressor, such as compressor='adacomp', or let "
            "`gradcomp advise` choose one in a run without it."
        ) from error


def _probe(
    group: Group,
    communicators: Sequence[Communicator],
    specs: Sequence[GradientSpec],
    candidates: Sequence[Candidate],
    effort: Effort,
) -> Probed:
    with tf.device("CPU:0"):
        collectives = Collectives(group, communicators)
        methods = [candidate.compressor for candidate in candidates]
        sample = Sample(specs, methods, collectives.rank, collectives.size, effort.elements)
        works = [sample.work(*candidate, group.processes.largest) for candidate in candidates]
        most: dict[Kind, float] = {}
        for work in works:
            for kind, sent_bytes in work.requests:
                most[kind] = max(sent_bytes, most.get(kind, 0.0))
        curves = collectives.curves(most, effort.seconds)
    predictions = [
        predict(
            text_of(candidate.compressor),
            work,
            curves,
            trains_like_dense=trains_like_dense(candidate),
        )
        for candidate, work in zip(candidates, works, strict=True)
    ]
    return Probed(predictions, curves, [spec.path for spec in specs if spec.kind == EMBEDDING])


# These methods exceed a limit of docs/advise.md, by its figures.
_BEHIND = ("scalecom", "random_k", "sign_sgd", "qsgd", "power_sgd")


def trains_like_dense(candidate: Candidate) -> bool | None:
    """Returns whether a method trained like dense in our measurements; None if not measured.

    Methods that profit from the division by Adam's second moment were measured with it.
    """
    text = text_of(candidate.compressor)
    if text in _BEHIND:
        return False
    as_measured = candidate.preconditioner or not candidate.compressor.helped_by_precondition
    return True if text in CANDIDATES and as_measured else None
