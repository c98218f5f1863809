"""Values of LGC's settings, its phases, and the state that the phases keep for the whole job."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from tf_gradcomp.compressors.base import JobStateSpec
from tf_gradcomp.policy import GradientSpec

if TYPE_CHECKING:
    from tf_gradcomp.compressors.lgc.method import LGC

ALL_REDUCE, PARAMETER_SERVER = "all_reduce", "parameter_server"
FLOAT16, FLOAT32 = "float16", "float32"

# Names in the state of the job; all except `SHARE_ERROR` are equal on all replicas, or count only
# on the first replica.
MADE_FOR = "lgc_made_for"  # a digest of the settings to which the state belongs; 0: no state yet
PHASE = "lgc_phase"
WANTED = "lgc_wanted"  # the phase that the first replica requests; 0: none
LATEST = "lgc_latest"  # float32 [2]: loss and relative error of the last step of training
LEARNING = "lgc_learning"  # the same, as the first replica last broadcast it
COLLECTED = "lgc_collected"  # steps whose vectors were collected
VECTORS = "lgc_vectors"
VECTOR_STEPS = "lgc_vector_steps"  # by row of `VECTORS`: which collected step, from 1 on; 0: none
LEARNED = "lgc_learned"  # the last collected step that the autoencoder was trained with
ERRORS = "lgc_errors"  # one plus the relative errors of the last of them; 0: none
WEIGHTS = "lgc_weights"
NORMS = "lgc_norms"  # `_norms` when this replica first led with the autoencoder; 0: not known
DECODED = "lgc_decoded"  # a digest of the last decoding
SHARE_ERROR = "lgc_share_error"  # of the sent part of this replica's own entries

_LEARNED_STATE = (
    PHASE,
    WANTED,
    LATEST,
    LEARNING,
    COLLECTED,
    VECTOR_STEPS,
    LEARNED,
    ERRORS,
    NORMS,
    DECODED,
)

SUMMING, COLLECTING, SWITCHING, CODING, ROUNDING = range(5)  # the phases, in their order
KEPT_VECTORS = 256
KEPT_ERRORS = 20


def phase_of(lgc: LGC, job_state: Mapping[str, tf.Variable]) -> tf.Tensor:
    """Returns the job's phase, int64 scalar; the first if its state has other settings."""
    return tf.where(_is_compatible(lgc, job_state), job_state[PHASE].read_value(), SUMMING)


def reset_if_incompatible(lgc: LGC, job_state: Mapping[str, tf.Variable]) -> None:
    """Resets state that was learnt for other vectors, or by another autoencoder."""

    def forget() -> None:
        for name in _LEARNED_STATE:
            job_state[name].assign(tf.zeros_like(job_state[name]))

    tf.cond(_is_compatible(lgc, job_state), lambda: None, forget)
    job_state[MADE_FOR].assign(_digest(lgc))


def _is_compatible(lgc: LGC, job_state: Mapping[str, tf.Variable]) -> tf.Tensor:
    """Returns whether the job's state is new, or is of an autoencoder with these settings."""
    made_for = job_state[MADE_FOR].read_value()
    return tf.logical_or(tf.equal(made_for, _digest(lgc)), tf.equal(made_for, 0))


def _digest(lgc: LGC) -> int:
    sizes = (lgc.architecture.encoder, lgc.architecture.decoder, lgc.architecture.slope)
    text = repr((lgc.pattern, lgc.order, lgc.innovation, sizes))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") + 1


def job_state_specs(lgc: LGC, specs: Sequence[GradientSpec]) -> dict[str, JobStateSpec]:
    """Returns the state that the phases keep for the whole job."""
    length = lgc.architecture.padded(max(lgc.layout(specs).coded_entries, 1))
    parameters = lgc.architecture.parameters(lgc.innovations)
    return {
        MADE_FOR: JobStateSpec((), "int64"),
        PHASE: JobStateSpec((), "int64"),
        WANTED: JobStateSpec((), "int64"),
        LATEST: JobStateSpec((2,)),
        LEARNING: JobStateSpec((2,)),
        COLLECTED: JobStateSpec((), "int64"),
        VECTORS: JobStateSpec((KEPT_VECTORS, length)),
        VECTOR_STEPS: JobStateSpec((KEPT_VECTORS,), "int64"),
        LEARNED: JobStateSpec((), "int64"),
        ERRORS: JobStateSpec((KEPT_ERRORS,)),
        WEIGHTS: JobStateSpec((parameters,)),
        NORMS: JobStateSpec((len(specs),), in_gradient_units=True),
        DECODED: JobStateSpec((), "int64"),
        SHARE_ERROR: JobStateSpec(()),
    }
