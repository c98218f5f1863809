"""Adam's division by the root of the second moment, before gradients are compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_gradcomp.ops import library
from tf_gradcomp.ops.payload import handles_of


class SecondMoments(NamedTuple):
    """The second moments of a replica's gradients, and the settings of Adam's division.

    Attributes:
        variables: float32 variables or their resource handles, updated in place.
        step: int64, a scalar or one for each gradient: 1 in its first step, as for Adam's bias
            correction.
        beta_2: Adam's decay rate, from 0 to less than 1.
        epsilon: Adam's small number that is added to roots, positive.
        corrects_epsilon: Whether epsilon is added before the bias of the second moment is
            corrected, as Keras' Adam does: the "epsilon hat" of the paper.
        scale: Positive; multiplies second moments. If `scale` is the number of replicas, the second
            moments of one replica's gradients estimate the second moments of the summed gradients.
        largest: For AMSGrad, like `variables`: their largest values so far, which divide in place
            of `variables`. Empty without AMSGrad.
        squares: For each gradient, float32 in its shape: values used in place of the squares of its
            elements; or None to use its own squares. Empty if all gradients use their own squares.
    """

    variables: Sequence[tf.Tensor | tf.Variable]
    step: tf.Tensor | int
    beta_2: float
    epsilon: float
    scale: float = 1.0
    largest: Sequence[tf.Tensor | tf.Variable] = ()
    squares: Sequence[tf.Tensor | None] = ()
    corrects_epsilon: bool = False

    def squares_or_empty(self) -> list[tf.Tensor]:
        """Returns the squares, with an empty tensor for a gradient that uses its own squares."""
        if all(square is None for square in self.squares):
            return []
        return [tf.zeros([0]) if square is None else square for square in self.squares]


def precondition(second_moments: SecondMoments, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Updates a replica's second moments, and divides its gradients by their roots.

    With `v` a second moment, `g` its gradient and `s` the given squares, or `g**2`, the update is
    `v += (1 - beta_2) * (s - v)`. The result is
    `g / (sqrt(scale * v / (1 - beta_2**step)) + epsilon)`. If epsilon is corrected too,
    `epsilon / sqrt(1 - beta_2**step)` takes its place. All arithmetic is float32, without fused
    multiply-add. If any gradient or its square is not finite, no second moment changes and all
    results are NaN. AMSGrad's largest second moments divide in separate passes.

    Args:
        second_moments: One for each gradient, in its shape.
        gradients: float32, float16 or bfloat16.

    Returns:
        float32, in the shapes of the gradients.

    Raises:
        tf.errors.InvalidArgumentError: If a shape or an argument is wrong.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1;
    Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond", ICLR 2018, algorithm 2.
    """
    divided = library.load().precondition(
        second_moments=handles_of(second_moments.variables),
        gradients=list(gradients),
        step=tf.convert_to_tensor(second_moments.step, tf.int64),
        squares=second_moments.squares_or_empty(),
        beta_2=second_moments.beta_2,
        epsilon=second_moments.epsilon,
        corrects_epsilon=second_moments.corrects_epsilon,
        scale=second_moments.scale,
    )
    if not second_moments.largest:
        return divided
    second_moment_handles, largest = map(
        handles_of, (second_moments.variables, second_moments.largest)
    )
    steps = tf.unstack(tf.broadcast_to(second_moments.step, [len(divided)]))
    return [
        gradient * _root_by_largest(second_moments, *arguments)
        for gradient, *arguments in zip(divided, second_moment_handles, largest, steps, strict=True)
    ]


def _root_by_largest(
    second_moments: SecondMoments, second_moment: tf.Tensor, largest: tf.Tensor, step: tf.Tensor
) -> tf.Tensor:
    """Updates AMSGrad's largest moments; returns the ratio of Adam's divisor to AMSGrad's."""
    now = tf.raw_ops.ReadVariableOp(resource=second_moment, dtype=tf.float32)
    most = tf.maximum(now, tf.raw_ops.ReadVariableOp(resource=largest, dtype=tf.float32))
    tf.raw_ops.AssignVariableOp(resource=largest, value=most)
    correction = 1 - tf.pow(second_moments.beta_2, tf.cast(step, tf.float32))
    root_of_factor = tf.sqrt(second_moments.scale / correction)
    epsilon = second_moments.epsilon
    if second_moments.corrects_epsilon:
        epsilon /= tf.sqrt(correction)
    return (root_of_factor * tf.sqrt(now) + epsilon) / (root_of_factor * tf.sqrt(most) + epsilon)
