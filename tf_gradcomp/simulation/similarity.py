"""The report of a step, and measures of the learners' similarity from ScaleCom's paper."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.exchange import sparse
from tf_gradcomp.exchange.replica import ReplicaStep
from tf_gradcomp.exchange.step import Observe


@dataclasses.dataclass(frozen=True)
class Similarity:
    """Measures of one step; NaN where there is nothing to measure.

    Attributes:
        union_density: The share of entries that at least one learner sent.
        cosine_distance: 1 - cosine between the residuals of two learners, the mean over all pairs.
        hamming_distance: d / k (ScaleCom, Lemma 1): the share of the k entries sent, of each
            variable, that are not among the k largest of all learners' residuals plus gradients.

    Source:
        Chen et al., "ScaleCom", NeurIPS 2020, https://arxiv.org/abs/2104.11125
    """

    union_density: float
    cosine_distance: float
    hamming_distance: float


class Comparison:
    """Compares learners in one step, which may have several exchanges, each of some variables."""

    def __init__(self, residuals: Sequence[Sequence[tf.Variable]]) -> None:
        self._of_all = residuals
        self._numbers: list[int] = []
        self._wanted: list[tf.Tensor] = []

    def observe(self, numbers: Sequence[int]) -> Observe:
        """Returns the observer of a step of some gradients; records what learners could send."""

        def note(places: Sequence[int], steps: list[ReplicaStep]) -> list[ReplicaStep]:
            steps = [dataclasses.replace(s, inputs=s.inputs.preconditioned()) for s in steps]
            own = [numbers[place] for place in places]
            of_learners = [step.inputs.gradients for step in steps]
            of_learners += [of_one for of_one in self._residuals(own) if of_one]
            self._numbers += own
            self._wanted += [
                tf.add_n([tf.cast(part, tf.float32) for part in parts])
                for parts in zip(*of_learners, strict=True)
            ]
            return steps

        return note

    def measure(self, gradients: Sequence[Any]) -> Similarity:
        """Returns the measures, given the sums of all gradients."""
        if not self._wanted:
            return Similarity(math.nan, math.nan, math.nan)
        reduced = [sparse.dense(gradients[number]) for number in self._numbers]
        return Similarity(
            union_density(reduced),
            mean_cosine_distance(self._residuals(self._numbers)),
            hamming_distance(reduced, self._wanted),
        )

    def _residuals(self, numbers: Sequence[int]) -> list[list[tf.Variable]]:
        """Returns each learner's residuals of some gradients."""
        return [[of_one[i] for i in numbers] if of_one else [] for of_one in self._of_all]


def union_density(reduced: Sequence[tf.Tensor]) -> float:
    """The share of entries that are not zero in reduced gradients."""
    sent = sum(int(tf.math.count_nonzero(tensor)) for tensor in reduced)
    return sent / max(1, sum(int(tf.size(tensor)) for tensor in reduced))


def mean_cosine_distance(residuals: Sequence[Sequence[tf.Variable]]) -> float:
    """Returns the mean over all pairs of learners; NaN without pairs, or by a zero residual."""
    learners = len(residuals)
    if learners < 2 or not residuals[0]:
        return float("nan")
    # The sum of unit vectors has all pairs in its square.
    norms = [tf.linalg.global_norm(of_one) for of_one in residuals]
    total = 0.0
    for of_variable in zip(*residuals, strict=True):
        units = [residual / length for residual, length in zip(of_variable, norms, strict=True)]
        total += float(tf.reduce_sum(tf.square(tf.add_n(units))))
    return 1 - (total - learners) / (learners * (learners - 1))


def hamming_distance(reduced: Sequence[tf.Tensor], wanted: Sequence[tf.Tensor]) -> float:
    """Returns the share of the sent entries that are not among the largest entries."""
    sent = missed = 0
    for given, target in zip(reduced, wanted, strict=True):
        places = tf.reshape(tf.not_equal(given, 0), [-1])
        count = int(tf.math.count_nonzero(places))
        _, largest = tf.math.top_k(tf.abs(tf.reshape(target, [-1])), count)
        sent += count
        missed += count - int(tf.math.count_nonzero(tf.gather(places, largest)))
    return missed / sent if sent else float("nan")


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Measures of one step; bytes are one learner's, as the mean over all learners.

    Attributes:
        loss: The mean over the batch.
        finite: Whether the step was taken. With several learners, a step is skipped if any
            learner's gradient is not finite.
        payload_bytes: The bytes of a learner's payload.
        sent_bytes: The bytes that a learner would send in a ring of workers, including the bytes
            that it forwards for others.
        dense_bytes: The bytes of a learner's gradients as float32.
        residual_norm: The Euclidean norm of a learner's residuals.
        similarity: The similarity of the learners, if it was requested.
    """

    loss: float
    finite: bool
    payload_bytes: float
    sent_bytes: float
    dense_bytes: int
    residual_norm: float
    similarity: Similarity | None = None
