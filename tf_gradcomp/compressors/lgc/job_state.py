"""LGC's settings, the state that its stages keep for the whole job, and the hook that trains."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.aggregation import digest_of_floats
from tf_gradcomp.compressors.base import Hook, JobStateSpec
from tf_gradcomp.compressors.lgc.autoencoder import Architecture
from tf_gradcomp.compressors.lgc.leader_step import Layout
from tf_gradcomp.compressors.settings import PerVariable
from tf_gradcomp.policy import FIRST, LAST, VECTOR, GradientSpec

ALL_REDUCE, PARAMETER_SERVER = "all_reduce", "parameter_server"
FLOAT16, FLOAT32 = "float16", "float32"

# Names in the state of the job; all except `SHARE_ERROR` are equal on all replicas, or count only
# on the first replica.
MADE_FOR = "lgc_made_for"  # a digest of the settings to which the state belongs; 0: no state yet
STAGE = "lgc_stage"
WANTED = "lgc_wanted"  # the stage that the first replica requests; 0: none
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
    STAGE,
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

SUMMING, COLLECTING, SWITCHING, CODING, ROUNDING = range(5)  # the stages, in their order
KEPT_VECTORS = 256
KEPT_ERRORS = 20
_SMALLEST = 1024  # elements of a tensor whose entries are chosen

_WHO_TRAINS = (
    "LGC sums the entries that a leader chooses until its autoencoder is trained. Train it with "
    "gc.callbacks.AutoencoderTraining, or call that callback's train(exchange) after each step of "
    "your own training loop."
)
_ENDS_UNKNOWN = (
    "LGC does not know the first and the last layer, and codes their kernels like all other "
    "kernels; pass policy=gc.Policy.from_model(model)."
)


class Settings:
    """The settings that LGC's stages and its hook read; the method itself."""

    pattern: str
    density: PerVariable[float]
    training_steps: int
    innovation: float
    latent_dtype: str
    guard: float
    warmup_steps: int
    architecture: Architecture

    @property
    def innovations(self) -> bool:
        """True if the autoencoder's output has a channel for innovations."""
        return self.pattern == PARAMETER_SERVER

    def layout(self, specs: Sequence[GradientSpec]) -> Layout:
        """Returns the layout, which says how each tensor is sent."""
        entries = tuple(map(self._entries, specs))
        selected = [index for index, count in enumerate(entries) if count]
        coded = tuple(index for index in selected if specs[index].end != LAST)
        return Layout(
            whole=tuple(index for index, count in enumerate(entries) if not count),
            coded=coded,
            plain=tuple(index for index in selected if specs[index].end == LAST),
            sizes=tuple(spec.elements for spec in specs),
            entries=entries,
            added=math.ceil(self.innovation * sum(entries[index] for index in coded)),
        )

    def _entries(self, spec: GradientSpec) -> int:
        """Returns the number of chosen entries of a tensor; 0 if it is sent dense."""
        named = any(re.search(pattern, spec.path) for pattern in self.density.overrides)
        small = spec.elements < _SMALLEST or spec.kind == VECTOR
        density = self.density.of(spec)
        if density is None or ((small or spec.end == FIRST) and not named):
            return 0
        return max(1, math.ceil(density * spec.elements)) if spec.elements else 0

    def current_stage(self, job_state: Mapping[str, tf.Variable]) -> tf.Tensor:
        """Returns the job's stage, int64 scalar; the first if its state has other settings."""
        return tf.where(self._is_made_for(job_state), job_state[STAGE].read_value(), SUMMING)

    def reset_if_incompatible(self, job_state: Mapping[str, tf.Variable]) -> None:
        """Resets state that was learned for other vectors, or by another autoencoder."""

        def forget() -> None:
            for name in _LEARNED_STATE:
                job_state[name].assign(tf.zeros_like(job_state[name]))

        tf.cond(self._is_made_for(job_state), lambda: None, forget)
        job_state[MADE_FOR].assign(self._digest)

    def _is_made_for(self, job_state: Mapping[str, tf.Variable]) -> tf.Tensor:
        """True if the job's state is new, or is of an autoencoder with these settings."""
        made_for = job_state[MADE_FOR].read_value()
        return tf.logical_or(tf.equal(made_for, self._digest), tf.equal(made_for, 0))

    @property
    def _digest(self) -> int:
        sizes = (self.architecture.encoder, self.architecture.decoder, self.architecture.slope)
        text = repr((self.pattern, self.innovation, sizes))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") + 1

    def job_state(self, specs: Sequence[GradientSpec]) -> dict[str, JobStateSpec]:
        """Returns the stage, the autoencoder's weights, and its training vectors."""
        length = self.architecture.padded(max(self.layout(specs).coded_entries, 1))
        parameters = self.architecture.parameters(self.innovations)
        return {
            MADE_FOR: JobStateSpec((), "int64"),
            STAGE: JobStateSpec((), "int64"),
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


class TrainingVectors(NamedTuple):
    """The training vectors of one step."""

    number: int  # the number of the step among the collected ones, from 1 on
    # float32 [replicas, entries]: the leader's vector first, then the vectors of the replicas after
    # it, in turn.
    vectors: np.ndarray


class TrainingStep(NamedTuple):
    """Result of one step of training."""

    number: int
    loss: float
    error: float


@dataclasses.dataclass(frozen=True)
class AutoencoderState:
    """State of the job's autoencoder, as seen from one process."""

    lgc: Settings
    # The job state of the process's first replica.
    job_state: Mapping[str, tf.Variable]
    specs: Sequence[GradientSpec]  # the specs of all gradients of the job
    trains: bool  # whether this process trains it, because it has the job's first replica

    @property
    def stage(self) -> int:
        """Returns the stage of the next step; dense steps come before."""
        return int(self.lgc.current_stage(self.job_state).numpy())

    @property
    def in_use(self) -> bool:
        """True if the autoencoder codes the sent entries."""
        return self.stage == CODING

    @property
    def was_in_use(self) -> bool:
        """True if the autoencoder is in use, or was in use before LGC abandoned it."""
        return bool(self.job_state[DECODED].numpy())

    @property
    def errors(self) -> dict[str, float]:
        """Returns loss and relative error of the training, as last broadcast, by name.

        If the autoencoder is in use, the relative squared error of this replica's sent entries is
        recorded, too.
        """
        loss, error = self.job_state[LEARNING].numpy().tolist()
        errors = {"autoencoder_loss": loss, "autoencoder_error": error}
        if self.in_use:
            errors["share_error"] = float(self.job_state[SHARE_ERROR].numpy())
        return errors

    @property
    def added(self) -> int:
        """Returns the number of coded entries in a replica's innovation."""
        return self.lgc.layout(self.specs).added

    @property
    def last_learned(self) -> int:
        """Returns the number of the last collected step that the autoencoder was trained with."""
        return int(self.job_state[LEARNED].numpy())

    @property
    def weights(self) -> np.ndarray | None:
        """Returns the weights from which training continues; None for a new model."""
        if not self.last_learned and not self.in_use:
            return self.lgc.architecture.weights
        return self.job_state[WEIGHTS].numpy()

    def ask_for_vectors(self) -> None:
        """Requests training vectors, collected after the dense steps."""
        if self.trains and self.stage == SUMMING and not int(self.job_state[WANTED].numpy()):
            self.job_state[WANTED].assign(COLLECTING)

    def new_vectors(self) -> list[TrainingVectors]:
        """Returns the vectors since the last training; older ones may be overwritten."""
        if not self.trains or self.stage != COLLECTING:
            return []
        last = self.last_learned
        if int(self.job_state[COLLECTED].numpy()) == last:
            return []
        steps = self.job_state[VECTOR_STEPS].numpy()
        vectors = self.job_state[VECTORS].numpy()
        return [
            TrainingVectors(int(step), vectors[steps == step])
            for step in np.unique(steps[steps > last])
        ]

    def last_vectors(self) -> np.ndarray | None:
        """Returns the vectors of the last step that collected vectors; None without any.

        Only the process with the first replica has them.
        """
        steps = self.job_state[VECTOR_STEPS].numpy()
        return self.job_state[VECTORS].numpy()[steps == steps.max()] if steps.any() else None

    def learn(self, weights: np.ndarray, learnt: Sequence[TrainingStep]) -> None:
        """Stores the result of training, and decides the next stage."""
        state, last = self.job_state, learnt[-1]
        errors = [1 + step.error for step in learnt]
        recent_errors = np.concatenate([state[ERRORS].numpy(), errors])[-KEPT_ERRORS:].astype(
            np.float32
        )
        state[WEIGHTS].assign(weights)
        state[ERRORS].assign(recent_errors)
        state[LEARNED].assign(last.number)
        state[LATEST].assign([last.loss, last.error])
        # The errors belong to earlier steps, and do not show whether the last step made weights
        # NaN.
        trained = bool(np.isfinite(weights).all())
        state[WANTED].assign(self._next_stage(last.number, recent_errors, trained))

    def _next_stage(self, steps: int, errors: np.ndarray, trained: bool) -> int:
        if steps < self.lgc.training_steps:
            return COLLECTING
        if trained and np.mean(errors[errors != 0]) - 1 < self.lgc.guard:
            return SWITCHING
        return ROUNDING if steps >= 2 * self.lgc.training_steps else COLLECTING


@dataclasses.dataclass(frozen=True)
class AutoencoderHook(Hook):
    """The hook that trains `LGC`'s autoencoder."""

    lgc: Settings
    specs: Sequence[GradientSpec]

    def notices(self) -> list[str]:
        """Returns notices on how to train the autoencoder, and on missing facts in the policy."""
        unknown = all(spec.end is None for spec in self.specs)
        return [_WHO_TRAINS, _ENDS_UNKNOWN] if unknown else [_WHO_TRAINS]

    def facts(self, job_state: Mapping[str, tf.Variable]) -> dict[str, Any]:
        """Returns the stage, and a checksum of weights in use."""
        state = self.state(job_state, trains=False)
        facts = {"phase of LGC": state.stage}
        if state.in_use:
            weights = job_state[WEIGHTS].read_value()
            facts["checksum of the autoencoder's weights"] = int(digest_of_floats(weights))
        return facts

    def state(self, job_state: Mapping[str, tf.Variable], trains: bool) -> AutoencoderState:
        """Returns the autoencoder's state as seen from one process; see `AutoencoderState`."""
        return AutoencoderState(self.lgc, job_state, self.specs, trains)
