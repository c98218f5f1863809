"""Gradient accumulation: each replica sums its gradients, and all exchange on update steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gradcomp.exchange.state import shared_variable
from tf_gradcomp.groups.group import Group


class Accumulated:
    """The number of gradients that each replica has added up since the last update.

    The number is equal on all workers, even if one worker has skipped a local step.

    Args:
        counter: Counts the inner optimizer's steps, including steps that only accumulate.
        steps: The number of steps per update.
    """

    def __init__(self, counter: tf.Variable, steps: int) -> None:
        self._counter, self._steps = counter, steps

    def numpy(self) -> int:
        """Returns the number."""
        return int(self._counter.numpy()) % self._steps


class Accumulation(tf.Module):
    """The sums of each replica's gradients since the last update.

    The only replica of a job has them in the inner optimizer. A job that resumes in the middle of
    an update with another number of replicas first moves the sums.

    Args:
        variables: The variables whose gradients are added up.
        steps: How many steps make one update.
        index_of: Gives the index of a variable among `variables`.
        inner: The inner optimizer's own accumulators of `variables`.
        group: The replicas.

    Attributes:
        accumulators: One for each of `variables`.
        held: bool, whether the sums are in the accumulators, and not in `inner`.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        steps: int,
        index_of: Callable[[keras.Variable], int],
        inner: Sequence[keras.Variable],
        group: Group,
    ) -> None:
        super().__init__(name="accumulation")
        self.accumulators = [_accumulator(variable) for variable in variables]
        self.held = shared_variable(False, tf.bool, "accumulators_held")
        self._values = [accumulator.value for accumulator in self.accumulators]  # for checkpoints
        self._steps = steps
        self._index_of = index_of
        self._inner = inner
        self._group = group

    @property
    def saved(self) -> dict[str, Any]:
        """The variables by name, as Keras' files have them."""
        sums = {f"accumulator_{i}": v for i, v in enumerate(self.accumulators)}
        return {**sums, "accumulators_held": self.held}

    def take(self, strategy: tf.distribute.Strategy) -> None:
        """Moves the sums from the inner optimizer, if it has them; called across replicas."""

        def move() -> None:
            strategy.extended.call_for_each_replica(self._take_share)
            self.held.assign(True)

        tf.cond(self.held, lambda: None, move)

    def _take_share(self) -> None:
        group = self._group
        for accumulator, inner in zip(self.accumulators, self._inner, strict=True):
            total = group.local(inner.value)
            accumulator.assign_add(total.read_value() / group.size)
            total.assign(tf.zeros_like(total))

    def move_to_inner(self) -> None:
        """Moves the sums to the inner optimizer, unless they are there; for the only replica."""

        def move() -> None:
            for accumulator, inner in zip(self.accumulators, self._inner, strict=True):
                inner.assign_add(accumulator.value)
                accumulator.assign(tf.zeros_like(accumulator.value))
            self.held.assign(False)

        tf.cond(self.held, move, lambda: None)

    def add(
        self, grads: Sequence[tf.Tensor | tf.IndexedSlices], variables: Sequence[keras.Variable]
    ) -> None:
        """Adds the gradients of a replica to its sums."""
        for gradient, variable in zip(grads, variables, strict=True):
            self._accumulator_for(variable).assign_add(tf.convert_to_tensor(gradient))

    def take_means(
        self, grads: Sequence[tf.Tensor | tf.IndexedSlices], variables: Sequence[keras.Variable]
    ) -> list[tf.Tensor]:
        """Adds the gradients of a replica; returns the means, and sets all sums to zero.

        As in Keras, the sums of variables without a gradient in this step are discarded.
        """
        self.add(grads, variables)
        means = [self._accumulator_for(variable).value / self._steps for variable in variables]
        with tf.control_dependencies(means):
            for accumulator in self.accumulators:
                accumulator.assign(tf.zeros_like(accumulator.value))
        return means

    def _accumulator_for(self, variable: keras.Variable) -> keras.Variable:
        return self.accumulators[self._index_of(variable)]


def _accumulator(variable: keras.Variable) -> keras.Variable:
    return keras.Variable(
        keras.initializers.Zeros(),
        shape=variable.shape,
        dtype=variable.dtype,
        trainable=False,
        synchronization="on_read",
        aggregation="sum",
        name=f"{variable.path.replace('/', '_')}_accumulator",
    )
