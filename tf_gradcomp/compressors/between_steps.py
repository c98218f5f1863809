"""Hooks that change a method's state between two steps of a job."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.base import Compressor
from tf_gradcomp.compressors.stages import stages
from tf_gradcomp.policy import GradientSpec

JobState = Mapping[str, tf.Variable]


class BetweenSteps(abc.ABC):
    """A hook of a method between two steps, such as training or planning."""

    @abc.abstractmethod
    def notices(self) -> list[str]:
        """Returns a notice for the user, logged once when the exchange is built."""

    @abc.abstractmethod
    def facts(self, job_state: JobState) -> dict[str, Any]:
        """Returns the facts that must be equal on all workers whenever they begin to exchange."""


class Proposing(BetweenSteps):
    """A hook in which the first replica proposes a change, and all replicas install it at once."""

    action: ClassVar[str]  # the action that workers report during the agreement
    caller_fact: ClassVar[str]  # the name of the fact that identifies the hook's caller
    state_name: ClassVar[str]  # the state of each gradient on which the proposal is based

    @abc.abstractmethod
    def no_change(self) -> np.ndarray:
        """Returns an array of a proposal's shape and dtype, for workers that wait for it."""

    @abc.abstractmethod
    def propose(self, state: Sequence[np.ndarray], job_state: JobState) -> np.ndarray:
        """Returns the proposal of the first replica, by its state `state_name` of each gradient."""

    @abc.abstractmethod
    def install(
        self, proposed: np.ndarray, job_state: JobState, state: Sequence[tf.Variable]
    ) -> None:
        """Installs in the state of one replica the proposal of the first replica."""

    @abc.abstractmethod
    def in_force(self, job_state: JobState) -> Any:
        """Returns the proposal that the next step will use, from a replica's job state."""


@runtime_checkable
class Hooked(Protocol):
    """A method that has a hook between two steps."""

    def between_steps(self, specs: Sequence[GradientSpec], replicas: int) -> BetweenSteps:
        """Returns the hook."""


def hooks_of(
    compressor: Compressor, specs: Sequence[GradientSpec], replicas: int
) -> list[BetweenSteps]:
    """Returns the hooks of a method, its warm-up and its phases, at most one of each class."""
    hooks: list[BetweenSteps] = []
    for stage in stages(compressor):
        if isinstance(stage, Hooked):
            hook = stage.between_steps(specs, replicas)
            if type(hook) in map(type, hooks):
                raise ValueError(
                    f"{compressor!r}: only one of its stages can be {type(stage).__name__}, "
                    "because its state belongs to the whole job; use another method in the other "
                    "stages."
                )
            hooks.append(hook)
    return hooks
