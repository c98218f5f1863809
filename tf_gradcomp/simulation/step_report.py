"""The report of one step of learners."""

from __future__ import annotations

import dataclasses

from tf_gradcomp.simulation.similarity import Similarity


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Measures of one step; bytes are one learner's, as the mean over all learners.

    Attributes:
        loss: The mean over the batch.
        finite: Whether the step was taken. With several learners, a step is skipped if any
            learner's gradient is not finite.
        payload_bytes: The bytes of a learner's payload.
        sent_bytes: The bytes that a learner would send in a ring of workers, including the bytes
            that it passes on for others.
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
