"""Moves second moments from the inner optimizer to the replicas, and back.

While a job is preconditioned, each replica keeps its own second moments, and the inner optimizer's
second moments are not updated. The inner optimizer's momentum and the residuals are then in units
of divided gradients. If the job resumes without a preconditioner, or with one replica, the second
moments must return to the inner optimizer, and momentum and residuals to units of undivided
gradients. A job that begins to be preconditioned needs the opposite conversion. No conversion needs
communication, because replicas restore equal shares of a checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp.adam.preconditioner import Correction, Preconditioner


@dataclasses.dataclass(frozen=True)
class InnerState:
    """The state of an inner optimizer of the Adam family on one replica, for some gradients."""

    updates: tf.Tensor
    moments: Mapping[str, Sequence[tf.Variable]]
    momentums: Sequence[tf.Variable]

    def updates_before(self, second_moment: tf.Tensor) -> tf.Tensor:
        """Returns the number of updates made before a second moment begins, int64 scalar."""
        has_begun = tf.reduce_any(second_moment > 0)
        return tf.where(has_begun, tf.zeros_like(self.updates), self.updates)


class InnerOptimizer(NamedTuple):
    """Functions of an inner optimizer that an exchange calls on each replica."""

    # Returns the state for some variables; None if no gradients can be divided.
    state: Callable[[Sequence[Any]], InnerState | None]
    # Clips gradients of some variables.
    clip: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def updates_after(updates: tf.Tensor, since: tf.Tensor) -> tf.Tensor:
    """Returns how many of an inner optimizer's `updates` followed the first `since`; int64."""
    return tf.maximum(updates - since, 0)


def is_unstarted(updates: tf.Tensor, since: tf.Tensor) -> tf.Tensor:
    """Returns which second moments have seen no gradient yet: bool, in the shape of `since`."""
    return since >= updates


def next_start_step(
    updates: tf.Tensor, since: tf.Tensor, begins: tf.Tensor, finite: tf.Tensor
) -> tf.Tensor:
    """Returns `since` after a step. Second moments begin with a gradient that is not all zeros."""
    waits = tf.logical_and(is_unstarted(updates, since), tf.logical_not(begins))
    return tf.where(tf.logical_and(finite, waits), updates + 1, since)


@dataclasses.dataclass(frozen=True)
class HandOver:
    """Moves the second moments of some gradients, on one replica or on all replicas in lockstep."""

    preconditioner: Preconditioner  # the preconditioner that keeps these second moments
    inner: InnerState  # the inner optimizer's state
    # Each replica's own second moments, by the names of `Preconditioner.state`.
    moments: Sequence[Mapping[str, Sequence[tf.Variable]]]
    # Other state of the replicas in units of the gradients, such as the residuals: for each kind
    # and replica, a variable for each gradient.
    gradient_state: Sequence[Sequence[tf.Variable]]
    # For each gradient, the sum of all replicas' residuals, undivided.
    waiting: Sequence[tf.Tensor]
    lost: tf.Tensor  # bool [gradients], whether the delayed part is lost; `waiting` is zeros there
    # int64 [gradients], the number of the inner optimizer's updates before the replica's own second
    # moment of each gradient began; 0 if it continues the inner optimizer's second moment.
    since: tf.Tensor
    replicas: int  # the number of replicas

    def to_replicas(self, index: int, wanted: tf.Tensor) -> tf.Tensor:
        """Moves a gradient's second moments from the inner optimizer to the replicas.

        Replicas in lockstep get the same shares as before, if they had any. State in units of the
        gradient, and the inner optimizer's momentum, are divided by the root of the second moment.
        If most of a gradient came late, the inner optimizer has squared sums over many steps. The
        root is then only an estimate, and the replica's own second moments start from this
        estimate, as in a first step. Returns the new `since` of the gradient; changes nothing
        unless `wanted`.
        """
        waiting = self.waiting[index]
        totals = {
            name: self.preconditioner.with_residuals(slots[index].read_value(), waiting)
            for name, slots in self.inner.moments.items()
        }
        second_moment = totals[self.preconditioner.root_of]
        came_late = tf.logical_or(
            self.lost[index], self._inner_correction.came_late(second_moment, waiting)
        )
        begins = tf.where(came_late, self._inner_correction.first_step_factor, 1.0)
        for name, total in totals.items():
            for moment, share in zip(
                self._moment_variables(name, index), self._shares(name, index), strict=True
            ):
                _assign(moment, begins * share * total, wanted)
        variables = self._in_units_of_the_gradient(index)
        values = [tf.cast(variable.read_value(), tf.float32) for variable in variables]
        divided = self._inner_correction.divided(values, second_moment)
        for variable, value in zip(variables, divided, strict=True):
            _assign(variable, value, wanted)
        continues = self.inner.updates_before(second_moment)
        since = tf.where(came_late, tf.maximum(self.inner.updates - 1, 0), continues)
        return tf.where(wanted, since, self._since[index])

    def to_inner(self, index: int, wanted: tf.Tensor) -> None:
        """Moves a gradient's second moments to the inner optimizer; inverse of `to_replicas`."""
        correction = self._corrections[index]
        root = correction.root(self._sum(self.preconditioner.root_of, index))
        # The inner optimizer corrects the bias of all second moments by its number of updates.
        grows = tf.square(self._inner_correction.factor / correction.factor)
        scale = tf.where(self._since[index] > 0, grows, 1.0)
        for name, moments in self.inner.moments.items():
            _assign(moments[index], scale * self._sum(name, index), wanted)
        for variable in self._in_units_of_the_gradient(index):
            _assign(variable, tf.cast(variable.read_value(), tf.float32) * root, wanted)

    @functools.cached_property
    def _inner_correction(self) -> Correction:
        return self.preconditioner.correction(self.inner.updates)

    @functools.cached_property
    def _corrections(self) -> list[Correction]:
        return self.preconditioner.corrections(updates_after(self.inner.updates, self.since))

    @functools.cached_property
    def _since(self) -> list[tf.Tensor]:
        return tf.unstack(self.since)

    def _moment_variables(self, name: str, index: int) -> list[tf.Variable]:
        return [moments[name][index] for moments in self.moments]

    def _sum(self, name: str, index: int) -> tf.Tensor:
        """Returns the second moment of all replicas; replicas elsewhere have the same shares."""
        total = tf.add_n([moment.read_value() for moment in self._moment_variables(name, index)])
        return self.replicas / len(self.moments) * total

    def _shares(self, name: str, index: int) -> list[tf.Tensor | float]:
        if len(self.moments) == 1:
            return [1 / self.replicas]
        total, moments = self._sum(name, index), self._moment_variables(name, index)
        return [tf.where(total > 0, moment / total, 1 / self.replicas) for moment in moments]

    def _in_units_of_the_gradient(self, index: int) -> list[tf.Variable]:
        return [
            self.inner.momentums[index],
            *(variables[index] for variables in self.gradient_state),
        ]


def _assign(variable: tf.Variable, value: tf.Tensor, wanted: tf.Tensor) -> None:
    variable.assign(tf.where(wanted, tf.cast(value, variable.dtype), variable.read_value()))
