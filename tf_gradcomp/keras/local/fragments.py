"""Fragments: parts of a model's variables, each with its own rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tf_gradcomp.exchange.gradients import native
from tf_gradcomp.exchange.state import assign, local_variable, shared_variable
from tf_gradcomp.groups.strategy_group import StrategyGroup

Number = TypeVar("Number", int, tf.Tensor)


def split(elements: Sequence[int], count: int) -> list[list[int]]:
    """Returns the indices of the variables of each fragment; fragments have nearly equal sizes.

    A variable is never split, so there are never more fragments than variables.

    Args:
        elements: The number of elements of each variable.
        count: The requested number of fragments.
    """
    fragments: list[list[int]] = [[] for _ in range(max(1, min(count, len(elements))))]
    for index in sorted(range(len(elements)), key=lambda index: -elements[index]):
        smallest = min(
            fragments, key=lambda fragment: (sum(elements[i] for i in fragment), len(fragment))
        )
        smallest.append(index)
    return sorted(map(sorted, fragments))


def due_after(index: int, fragments: int, length: Number) -> Number:
    """Returns the step of a cycle of `length` steps after which a fragment is exchanged.

    The fragments are spread evenly over the cycle, and the last fragment comes at its end. If there
    are more fragments than steps, some steps exchange several.
    """
    return ((index + 1) * length + fragments - 1) // fragments


def flatten(values: Sequence[Any]) -> tf.Tensor:
    """Returns all elements of variables or tensors: float32 vector, which holds halves exactly.

    Rounds compute with one vector, because ops for each variable make a graph that takes longer to
    trace.
    """
    vector = tf.constant([-1])
    return tf.concat([tf.cast(tf.reshape(value, vector), tf.float32) for value in values], 0)


def unflatten(vector: tf.Tensor, like: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the elements of a vector in the shapes and dtypes of other values."""
    shapes = [tuple(value.shape) for value in like]
    shape_constants = {shape: tf.constant(shape, tf.int32) for shape in dict.fromkeys(shapes)}
    parts = tf.split(vector, [math.prod(shape) for shape in shapes])
    return [
        tf.cast(tf.reshape(part, shape_constants[shape]), value.dtype)
        for part, shape, value in zip(parts, shapes, like, strict=True)
    ]


class Fragment:
    """Variables that are exchanged together, and the state of their round.

    No checkpoint holds this state, because checkpoints are written between rounds.

    Args:
        group: The replicas; they create the state.
        variables: The variables.
        residuals: The residuals of the variables; empty if the method has no residual.

    Attributes:
        variables: The variables.
    """

    def __init__(
        self, group: StrategyGroup, variables: Sequence[Any], residuals: Sequence[tf.Variable]
    ) -> None:
        self.variables = variables
        self._group, self._residuals = group, residuals
        elements = sum(native(variable).shape.num_elements() for variable in variables)
        self._start = local_variable(tf.zeros([elements]), "start", True)
        self._steps = shared_variable(0, tf.int64, "steps_in_round")
        self._drift = local_variable(0.0, "drift", True)
        self._updates = shared_variable(0, tf.int64, "outer_updates")

    def _local(self, variable: Any) -> tf.Variable:
        return self._group.local(native(variable), 0)

    @property
    def weights(self) -> list[tf.Variable]:
        """Returns this worker's copies of the variables."""
        return [self._local(variable) for variable in self.variables]

    @property
    def residuals(self) -> list[tf.Variable]:
        """Returns this worker's residuals."""
        return [self._local(residual) for residual in self._residuals]

    @property
    def start(self) -> tf.Variable:
        """Returns the common weights at the start of the round, as `flatten` returns them."""
        return self._local(self._start)

    @property
    def steps(self) -> tf.Variable:
        """Returns the number of steps of the round so far."""
        return self._local(self._steps)

    @property
    def drift(self) -> tf.Variable:
        """Returns this worker's drift in the latest round; the workers' mean after an early end."""
        return self._local(self._drift)

    @property
    def updates(self) -> tf.Variable:
        """Returns the number of the outer optimizer's updates of the variables."""
        return self._local(self._updates)

    @property
    def has_begun(self) -> bool:
        """Whether the workers' weights differ, because a round has begun."""
        return bool(self.steps.numpy() > 0)

    def begin(self) -> tf.Tensor:
        """Takes the weights as the common weights, unless the round has begun.

        Returns a bool scalar, whether the round begins now.
        """

        def take() -> tf.Tensor:
            self.take_start()
            return tf.constant(True)

        return tf.cond(tf.equal(self.steps, 0), take, lambda: tf.constant(False))

    def take_start(self) -> None:
        """Takes the weights as the weights at the start of the round."""
        self.start.assign(flatten(self.weights))

    def assign_weights(self, values: tf.Tensor) -> None:
        """Assigns weights, as `flatten` returns them, on this worker."""
        assign(self.weights, unflatten(values, self.weights))
