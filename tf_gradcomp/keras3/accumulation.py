"""Gradient accumulation: each replica adds up on its own, and all exchange on steps that update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf


class Accumulation:
    """The sums of each replica's gradients since the last update.

    Args:
        variables: The variables whose gradients are added up.
        steps: How many steps make one update.
        index_of: Gives the place of a variable among `variables`.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        steps: int,
        index_of: Callable[[keras.Variable], int],
    ) -> None:
        self.accumulators = [_accumulator(variable) for variable in variables]
        self._steps = steps
        self._index_of = index_of

    def add(
        self, grads: Sequence[tf.Tensor | tf.IndexedSlices], variables: Sequence[keras.Variable]
    ) -> None:
        """Adds the gradients of a replica to its sums."""
        for gradient, variable in zip(grads, variables, strict=True):
            self._of(variable).assign_add(tf.convert_to_tensor(gradient))

    def take_means(
        self, grads: Sequence[tf.Tensor | tf.IndexedSlices], variables: Sequence[keras.Variable]
    ) -> list[tf.Tensor]:
        """Adds the gradients of a replica; returns the means, and sets the sums to zero."""
        self.add(grads, variables)
        accumulators = [self._of(variable) for variable in variables]
        means = [accumulator.value / self._steps for accumulator in accumulators]
        with tf.control_dependencies(means):
            for accumulator in accumulators:
                accumulator.assign(tf.zeros_like(accumulator.value))
        return means

    def _of(self, variable: keras.Variable) -> keras.Variable:
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
