"""LGC's autoencoder in the state of a job: its phase, training vectors and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.aggregation import digest_of_floats
from tf_gradcomp.compressors.base import Hook
from tf_gradcomp.compressors.lgc.settings import (
    CODING,
    COLLECTED,
    COLLECTING,
    DECODED,
    ERRORS,
    KEPT_ERRORS,
    LATEST,
    LEARNED,
    LEARNING,
    ROUNDING,
    SHARE_ERROR,
    SUMMING,
    SWITCHING,
    VECTOR_STEPS,
    VECTORS,
    WANTED,
    WEIGHTS,
    phase_of,
)
from tf_gradcomp.policy import GradientSpec

if TYPE_CHECKING:
    from tf_gradcomp.compressors.lgc.method import LGC

_WHO_TRAINS = (
    "LGC sums the entries that a leader chooses until its autoencoder is trained. Train it with "
    "gc.callbacks.AutoencoderTraining, or call that callback's train(exchange) after each step of "
    "your own training loop."
)
_ENDS_UNKNOWN = (
    "LGC does not know the first and the last layer, and codes their kernels like all other "
    "kernels; pass policy=gc.Policy.from_model(model)."
)


class CollectedVectors(NamedTuple):
    """The training vectors of one step."""

    step: int  # the number of the step among the collected ones, from 1 on
    # float32 [replicas, entries]: the leader's vector first, then the vectors of the replicas after
    # it, in turn.
    vectors: np.ndarray


class TrainingResult(NamedTuple):
    """Result of one step of training."""

    step: int
    loss: float
    error: float


@dataclasses.dataclass(frozen=True)
class AutoencoderState:
    """State of the job's autoencoder, as seen from one process."""

    lgc: LGC  # the method
    # The job state of the process's first replica.
    job_state: Mapping[str, tf.Variable]
    specs: Sequence[GradientSpec]  # the specs of all gradients of the job
    trains: bool  # whether this process trains it, because it has the job's first replica

    @property
    def phase(self) -> int:
        """Returns the phase of the next step (see `settings.py`); dense steps come before."""
        return int(phase_of(self.lgc, self.job_state).numpy())

    @property
    def in_use(self) -> bool:
        """Returns whether the autoencoder codes the sent entries."""
        return self.phase == CODING

    @property
    def was_in_use(self) -> bool:
        """Returns whether the autoencoder is in use, or was in use before LGC abandoned it."""
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
        if self.trains and self.phase == SUMMING and not int(self.job_state[WANTED].numpy()):
            self.job_state[WANTED].assign(COLLECTING)

    def new_vectors(self) -> list[CollectedVectors]:
        """Returns the vectors since the last training; older ones may be overwritten."""
        if not self.trains or self.phase != COLLECTING:
            return []
        last = self.last_learned
        if int(self.job_state[COLLECTED].numpy()) == last:
            return []
        steps = self.job_state[VECTOR_STEPS].numpy()
        vectors = self.job_state[VECTORS].numpy()
        return [
            CollectedVectors(int(step), vectors[steps == step])
            for step in np.unique(steps[steps > last])
        ]

    def last_vectors(self) -> np.ndarray | None:
        """Returns the vectors of the last step that collected vectors; None without any.

        Only the process with the first replica has them.
        """
        steps = self.job_state[VECTOR_STEPS].numpy()
        return self.job_state[VECTORS].numpy()[steps == steps.max()] if steps.any() else None

    def learn(self, weights: np.ndarray, learnt: Sequence[TrainingResult]) -> None:
        """Stores the result of training, and decides the next phase."""
        state, last = self.job_state, learnt[-1]
        errors = [1 + result.error for result in learnt]
        recent_errors = np.concatenate([state[ERRORS].numpy(), errors])[-KEPT_ERRORS:].astype(
            np.float32
        )
        state[WEIGHTS].assign(weights)
        state[ERRORS].assign(recent_errors)
        state[LEARNED].assign(last.step)
        state[LATEST].assign([last.loss, last.error])
        # The errors belong to earlier steps, and do not show whether the last step made weights
        # NaN.
        trained = bool(np.isfinite(weights).all())
        state[WANTED].assign(self._next_phase(last.step, recent_errors, trained))

    def _next_phase(self, steps: int, errors: np.ndarray, trained: bool) -> int:
        if steps < self.lgc.training_steps:
            return COLLECTING
        if trained and np.mean(errors[errors != 0]) - 1 < self.lgc.guard:
            return SWITCHING
        return ROUNDING if steps >= 2 * self.lgc.training_steps else COLLECTING


@dataclasses.dataclass(frozen=True)
class AutoencoderHook(Hook):
    """The hook that trains `LGC`'s autoencoder."""

    lgc: LGC
    specs: Sequence[GradientSpec]

    def notices(self) -> list[str]:
        """Returns notices on how to train the autoencoder, and on missing facts in the policy."""
        unknown = all(spec.end is None for spec in self.specs)
        return [_WHO_TRAINS, _ENDS_UNKNOWN] if unknown else [_WHO_TRAINS]

    def facts(self, job_state: Mapping[str, tf.Variable]) -> dict[str, Any]:
        """Returns the phase, and a checksum of weights in use."""
        state = self.state(job_state, trains=False)
        facts = {"phase of LGC": state.phase}
        if state.in_use:
            weights = job_state[WEIGHTS].read_value()
            facts["checksum of the autoencoder's weights"] = int(digest_of_floats(weights))
        return facts

    def state(self, job_state: Mapping[str, tf.Variable], trains: bool) -> AutoencoderState:
        """Returns the autoencoder's state as seen from one process; see `AutoencoderState`."""
        return AutoencoderState(self.lgc, job_state, self.specs, trains)
