"""Settings that LGC's phases share, and state that the phases keep for the whole job."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.base import JobStateSpec
from tf_gradcomp.compressors.lgc.autoencoder import Architecture
from tf_gradcomp.compressors.lgc.leader_selection import Layout
from tf_gradcomp.compressors.per_variable import PerVariable
from tf_gradcomp.policy import FIRST, LAST, VECTOR, GradientSpec

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
LEARNT = "lgc_learnt"  # the last collected step that the autoencoder was trained with
ERRORS = "lgc_errors"  # one plus the relative errors of the last of them; 0: none
WEIGHTS = "lgc_weights"
NORMS = "lgc_norms"  # `_norms` when this replica first led with the autoencoder; 0: not known
RISE_UNTIL = "lgc_norms_rise_until"  # the step up to which `NORMS` are the largest so far; 0: none
DECODED = "lgc_decoded"  # a digest of the last decoding
SHARE_ERROR = "lgc_share_error"  # of the sent part of this replica's own entries

_OF_WHAT_WAS_LEARNT = (
    PHASE,
    WANTED,
    LATEST,
    LEARNING,
    COLLECTED,
    VECTOR_STEPS,
    LEARNT,
    ERRORS,
    NORMS,
    RISE_UNTIL,
    DECODED,
)

SUMMING, COLLECTING, SWITCHING, CODING, ROUNDING = range(5)  # the phases, in their order
KEPT_VECTORS = 256
KEPT_ERRORS = 20

_SMALLEST = 1024  # elements of a tensor whose entries are chosen


@dataclasses.dataclass(frozen=True)
class PhaseSettings:
    """The settings of `LGC` that its phases need."""

    pattern: str  # `ALL_REDUCE` or `PARAMETER_SERVER`
    training_steps: int  # of the phase in which the autoencoder learns
    density: PerVariable[float]  # the share of chosen entries, by variable
    innovation: float  # the share of the coded entries in a replica's innovation
    order: str  # of the coded entries; see `leader_selection.ORDERS`
    latent_dtype: str  # `FLOAT32` or `FLOAT16`
    architecture: Architecture  # of the autoencoder
    config: Mapping[str, Any]  # all settings of `LGC`; they differ if replicas have other settings

    @property
    def innovations(self) -> bool:
        """Returns whether the autoencoder's output has a channel for innovations."""
        return self.pattern == PARAMETER_SERVER

    def phase(self, job_state: Mapping[str, tf.Variable]) -> tf.Tensor:
        """Returns the job's phase, int64 scalar; the first if its state has other settings."""
        return tf.where(self._is_made_for(job_state), job_state[PHASE].read_value(), SUMMING)

    def _is_made_for(self, job_state: Mapping[str, tf.Variable]) -> tf.Tensor:
        """Returns whether the job's state is new, or is of an autoencoder with these settings."""
        made_for = job_state[MADE_FOR].read_value()
        return tf.logical_or(tf.equal(made_for, self._digest), tf.equal(made_for, 0))

    def reset_if_incompatible(self, job_state: Mapping[str, tf.Variable]) -> None:
        """Resets state that was learnt for other vectors, or by another autoencoder."""

        def forget() -> None:
            for name in _OF_WHAT_WAS_LEARNT:
                job_state[name].assign(tf.zeros_like(job_state[name]))

        tf.cond(self._is_made_for(job_state), lambda: None, forget)
        job_state[MADE_FOR].assign(self._digest)

    @functools.cached_property
    def _digest(self) -> int:
        sizes = (self.architecture.encoder, self.architecture.decoder, self.architecture.slope)
        text = repr((self.pattern, self.order, self.innovation, sizes))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") + 1

    def layout(self, specs: Sequence[GradientSpec]) -> Layout:
        """Returns the layout, which says how each tensor is sent."""
        entries = tuple(self._entries(spec) for spec in specs)
        places = range(len(specs))
        selected = [place for place in places if entries[place]]
        return Layout(
            whole=tuple(place for place in places if not entries[place]),
            coded=tuple(place for place in selected if specs[place].end != LAST),
            plain=tuple(place for place in selected if specs[place].end == LAST),
            entries=entries,
            place_words=tuple(
                ops.leader_place_words(spec.elements, count)
                for spec, count in zip(specs, entries, strict=True)
            ),
        )

    def _entries(self, spec: GradientSpec) -> int:
        named = any(re.search(pattern, spec.path) for pattern in self.density.overrides)
        small = spec.elements < _SMALLEST or spec.kind == VECTOR
        density = self.density.of(spec)
        if density is None or ((small or spec.end == FIRST) and not named):
            return 0
        return max(1, math.ceil(density * spec.elements)) if spec.elements else 0

    def padded(self, entries: int) -> int:
        """The length of a vector of the autoencoder."""
        return self.architecture.padded(max(entries, 1))

    def added(self, entries: int) -> int:
        """Returns the number of coded entries in a replica's innovation."""
        return math.ceil(self.innovation * entries)

    def job_state(self, specs: Sequence[GradientSpec]) -> dict[str, JobStateSpec]:
        """Returns the state that the phases keep for the whole job."""
        length = self.padded(self.layout(specs).coded_entries)
        parameters = self.architecture.parameters(self.innovations)
        return {
            MADE_FOR: JobStateSpec((), "int64"),
            PHASE: JobStateSpec((), "int64"),
            WANTED: JobStateSpec((), "int64"),
            LATEST: JobStateSpec((2,)),
            LEARNING: JobStateSpec((2,)),
            COLLECTED: JobStateSpec((), "int64"),
            VECTORS: JobStateSpec((KEPT_VECTORS, length)),
            VECTOR_STEPS: JobStateSpec((KEPT_VECTORS,), "int64"),
            LEARNT: JobStateSpec((), "int64"),
            ERRORS: JobStateSpec((KEPT_ERRORS,)),
            WEIGHTS: JobStateSpec((parameters,)),
            NORMS: JobStateSpec((len(specs),), of_gradients=True),
            RISE_UNTIL: JobStateSpec((len(specs),), "int64"),
            DECODED: JobStateSpec((), "int64"),
            SHARE_ERROR: JobStateSpec(()),
        }
