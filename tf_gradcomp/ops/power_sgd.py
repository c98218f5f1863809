"""PowerSGD: the ops of one step, each for all tensors at once.

Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, https://arxiv.org/abs/1905.13727, Algorithms 1 and 2.
`tests.reference.power_sgd` computes the same in NumPy.

A tensor of rank r above 0 is a matrix M of n rows and m columns. The last axis of a tensor is the
matrix's columns. A tensor of rank 0 is sent whole. With E the residual, G the gradient and Q the
factor:

    M = E + G
    P = M Q                        `power_sgd_left`, summed over the replicas
    P <- orthonormal columns of P
    R = M^T P                      `power_sgd_right`, S = R summed over the replicas
    reduced = P S^T                `power_sgd_reduce`
    E <- M - P R^T
    Q <- S, columns scaled to length 1

All replicas compute the same bits from the sums. Results do not depend on the number of threads.

ACP-SGD (Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep
Learning", ICDCS 2023, https://arxiv.org/abs/2306.08881) sums once in each step. The factor is
[n + m, R], P above Q. Only the side that the last sum gave has its columns there; the other side is
zeros.

    Q known: Q <- orthonormal columns of Q, P = M Q      `power_sgd_project`, summed
    P known: P <- orthonormal columns of P, Q = M^T P    `power_sgd_project`, summed
    reduced = P Q^T with the sum                         `power_sgd_reduce_projected`
    E <- M - P Q^T with the local product
    the factor becomes the sum, columns scaled to length 1

Each tensor alternates by its own factor, independently of other tensors and of skipped steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp.ops import library
from tf_gradcomp.ops.payload import Settings, handles_of, tensor_of


def power_sgd_left(
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    factors: Sequence[tf.Tensor | tf.Variable],
    step: tf.Tensor | int,
    *,
    ranks: Settings,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes a replica's contribution to the first sum, and changes no variable.

    Pseudo-random values from -1 to 1 replace each zero column of a factor, because a zero column
    would never send anything. The values depend on `step` and the index of the tensor alone.

    Args:
        residuals: float32 variables or their resource handles.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        factors: float32 variables or their resource handles, of shape [m, R] with R of r or
            more; the first r columns are used. [0] is allowed for a tensor that is sent whole.
        step: int64 scalar, the same on all replicas.
        ranks: One per tensor, 1 to min(n, m), or 0 to send the tensor whole. They may change
            between steps.

    Returns:
        left, float32 [1 + elements]: a flag, 0 or NaN where residual plus gradient is not finite
        anywhere; then for each tensor P as [r, n], or the tensor itself. And finite, bool scalar:
        whether the flag is 0.
    """
    return library.load().power_sgd_left(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        factors=handles_of(factors),
        step=tf.convert_to_tensor(step, tf.int64),
        ranks=tensor_of(ranks),
    )


def power_sgd_right(
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    left_sum: tf.Tensor,
    *,
    ranks: Settings,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Orthonormalizes P and computes this replica's term of the second sum.

    A column of P becomes zero if it is a combination of the columns before it, to 1e-4 of its
    length. No variable changes.

    Args:
        residuals: As for `power_sgd_left`.
        gradients: As for `power_sgd_left`.
        left_sum: float32, `left` summed over the replicas.
        ranks: As for `power_sgd_left`.

    Returns:
        left, left_sum with orthonormal P; right, float32 [elements]: for each tensor R as [r, m],
        and nothing for tensors sent whole; and finite, bool scalar: whether left_sum is finite.
        If it is not, right is zeros.
    """
    return library.load().power_sgd_right(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        left_sum=left_sum,
        ranks=tensor_of(ranks),
    )


def power_sgd_reduce(
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    factors: Sequence[tf.Tensor | tf.Variable],
    left: tf.Tensor,
    right: tf.Tensor,
    right_sum: tf.Tensor,
    *,
    keep: tf.Tensor | bool,
    finite: tf.Tensor | bool,
    ranks: Settings,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Multiplies the factors, and updates residuals and factors.

    Args:
        residuals: As for `power_sgd_left`; updated in place.
        gradients: As for `power_sgd_left`.
        factors: As for `power_sgd_left`; updated in place. Columns after the first r become zero,
            so that a rank that grows later restarts them alike on all replicas.
        left: From `power_sgd_right`.
        right: From `power_sgd_right`.
        right_sum: float32, `right` summed over the replicas.
        keep: bool scalar: whether a skipped step adds this replica's gradients to its residuals.
            If the flag in `left` says that all replicas are finite, tensors whose sums or products
            are too large get zero residuals instead, because the next step would overflow again.
        finite: bool scalar, the same on all replicas; false skips the step.
        ranks: As for `power_sgd_left`.

    Returns:
        reduced, one float32 tensor per gradient, in its shape; and all_finite, bool scalar: whether
        the step is taken. If it is not, reduced are zeros and factors stay as they are.
    """
    return library.load().power_sgd_reduce(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        factors=handles_of(factors),
        left=left,
        right=right,
        right_sum=right_sum,
        keep=keep,
        finite=finite,
        ranks=tensor_of(ranks),
    )


def power_sgd_project(
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    factors: Sequence[tf.Tensor | tf.Variable],
    step: tf.Tensor | int,
    *,
    ranks: Settings,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Computes a replica's contribution to the only sum of ACP-SGD, and changes no variable.

    Pseudo-random values from -1 to 1 replace each zero column of the known side. These values
    depend only on `step` and the factors.

    Args:
        residuals: As for `power_sgd_left`.
        gradients: As for `power_sgd_left`.
        factors: float32 variables or their resource handles, of shape [n + m, R] with R of r or
            more; equal on all replicas. [0] is allowed for a tensor that is sent whole.
        step: int64 scalar, the same on all replicas.
        ranks: As for `power_sgd_left`.

    Returns:
        local, float32 [1 + elements]: a flag, 0 or NaN where residual plus gradient is not finite
        anywhere; then P as [r, n] of each tensor that sends it, or the tensor itself; then Q as
        [r, m] of the other tensors. Also the bytes of each tensor in it, int64 [tensors]; and
        finite, bool scalar: whether the flag is 0.
    """
    return library.load().power_sgd_project(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        factors=handles_of(factors),
        step=tf.convert_to_tensor(step, tf.int64),
        ranks=tensor_of(ranks),
    )


def power_sgd_reduce_projected(
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    factors: Sequence[tf.Tensor | tf.Variable],
    step: tf.Tensor | int,
    factor: tf.Tensor,
    total: tf.Tensor,
    *,
    keep: tf.Tensor | bool,
    finite: tf.Tensor | bool,
    ranks: Settings,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Multiplies the factors, and updates residuals and factors.

    Args:
        residuals: As for `power_sgd_left`; updated in place.
        gradients: As for `power_sgd_left`.
        factors: As for `power_sgd_project`; updated in place. Columns after the first r become
            zero.
        step: As for `power_sgd_project`.
        factor: From `power_sgd_project`.
        total: float32, `factor` summed over the replicas.
        keep: As for `power_sgd_reduce`.
        finite: As for `power_sgd_reduce`.
        ranks: As for `power_sgd_left`.

    Returns:
        As `power_sgd_reduce` does.
    """
    return library.load().power_sgd_reduce_projected(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        factors=handles_of(factors),
        step=tf.convert_to_tensor(step, tf.int64),
        local=factor,
        total=total,
        keep=keep,
        finite=finite,
        ranks=tensor_of(ranks),
    )
