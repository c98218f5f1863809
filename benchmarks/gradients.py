"""Gradients to exchange, and functions that reduce them over the workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jobs
import keras
import tensorflow as tf

Reduction = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]


class Gradients:
    """The gradients of a step, a different stream on each worker.

    Gradients are distributed as in AdaComp's acceptance test: each weight has a mean, drawn once
    from N(0, 0.02^2), and noise of scale 0.3 in each step. The noise is drawn once as a long
    vector, which each step reads from another offset, because drawing it would take longer than
    most exchanges.
    """

    def __init__(self, variables: Sequence[keras.Variable], seed: int) -> None:
        self._sizes = [math.prod(variable.shape) for variable in variables]
        self._random = tf.random.Generator.from_seed(seed)
        self._noise = self._random.normal([sum(self._sizes) + jobs.NOISE_PLACES], stddev=0.3)
        self._means = [tf.random.normal(variable.shape, stddev=0.02) for variable in variables]
        self.values = [tf.Variable(mean) for mean in self._means]
        shapes = [mean.shape for mean in self._means]
        self._handed_over = tf.queue.FIFOQueue(1, [tf.float32] * len(shapes), shapes)

    @tf.function(autograph=False)
    def draw(self) -> None:
        """Draws the gradients of the next step."""
        start = self._random.uniform([], maxval=jobs.NOISE_PLACES, dtype=tf.int32)
        noise = tf.split(self._noise[start : start + sum(self._sizes)], self._sizes)
        for mean, part, value in zip(self._means, noise, self.values, strict=True):
            value.assign(mean + tf.reshape(part, mean.shape))

    @tf.function(autograph=False)
    def hand_over(self) -> None:
        """Draws the gradients of the next step, for `take`."""
        self.draw()
        self._handed_over.enqueue([tf.raw_ops.DeepCopy(x=value) for value in self.values])

    def take(self) -> list[tf.Tensor]:
        """Returns the gradients that `draw` has prepared.

        As after a backward pass, nothing else uses their memory.
        """
        taken = self._handed_over.dequeue()
        return list(taken) if isinstance(taken, (list, tuple)) else [taken]


def on_replica(
    strategy: tf.distribute.Strategy,
    reduction: Reduction,
    take: Callable[[], Sequence[tf.Tensor]],
) -> Callable[[], object]:
    """Returns a function that reduces the gradients on all replicas.

    The function takes the gradients itself, because Python takes milliseconds to pass so many
    arguments.
    """
    return tf.function(
        lambda: strategy.run(lambda: reduction(take())),
        autograph=False,
    )


def all_reduce(gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """The sum over the replicas, as TensorFlow computes it."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)


def all_reduce_float16(gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """The sum over the replicas of numbers rounded to 16 bits."""
    totals = all_reduce([tf.cast(gradient, tf.float16) for gradient in gradients])
    return [tf.cast(total, tf.float32) for total in totals]


def mean_over_workers(strategy: tf.distribute.Strategy) -> Callable[[float], float]:
    """Returns the mean of a number over the workers, once all workers have called this."""

    def mean(number: tf.Tensor) -> tf.Tensor:
        placed = tf.identity(number)  # an argument is on no device
        return tf.distribute.get_replica_context().all_reduce("mean", placed)

    on_all = tf.function(lambda number: strategy.run(mean, (number,)), autograph=False)
    local = strategy.experimental_local_results
    return lambda number: float(local(on_all(tf.constant(number, tf.float32)))[0])
