"""PowerSGD: a gradient is sent as the product of two thin matrices."""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import request_unless_empty
from tf_gradcomp.compressors.base import Reduced, StateSpec, StepInputs
from tf_gradcomp.compressors.plans import (
    Cost,
    Plannable,
    distinct,
    is_planned,
    sum_of_squares,
    whole,
)
from tf_gradcomp.compressors.requests import AllReduce
from tf_gradcomp.compressors.settings import BOOL, PerVariable, Valid, is_whole_number
from tf_gradcomp.policy import LAYER_KINDS, GradientSpec

FACTOR = "factor"
ALTERNATING_FACTOR = "alternating_factor"
FACTORS = (FACTOR, ALTERNATING_FACTOR)
SENT_WHOLE = 0  # in place of a rank, to the ops
LARGEST_GRAM = 2048  # rows of a matrix whose eigenvalues are computed
_POWER_ITERATIONS = 5
_RANK = Valid("a whole number of at least 1", lambda rank: is_whole_number(rank, 1, sys.maxsize))
_DEFAULT_RANKS = dict.fromkeys(LAYER_KINDS, 4)


class PowerSGD(Plannable):
    """Sums two thin matrices, whose product approximates the gradient of a layer.

    The residual plus gradient of each variable is viewed as a matrix of n rows and m columns, where
    m is its last axis. The matrix is sent as the product of an n x r and an m x r matrix; the
    approximation error stays in the residual. Each step begins with the factors of the step before,
    and therefore comes close to the best approximation of rank r. The ratio is fixed: n m / (r (n +
    m)). On digits and MNIST with 2 and 8 replicas, ScaleCom sent less and was more accurate.

    Use it if layers are large, and a simulation of your job shows that low rank trains well enough.
    It sums, so the bytes that a replica sends do not grow with the number of replicas, but it was
    behind dense on a character LSTM. PowerSGD communicates twice in a step, and reads gradient and
    residual three times. Vectors are summed whole, as float32. A matrix is also summed whole if its
    two factors have at least half as many entries as the matrix.

    With `alternate=True` (ACP-SGD), a step sends one of the two factors, and the next step the
    other one. For the factor that is not sent, all replicas use its last sum, which they know.
    Alternating halves the bytes, communicates once in a step, and reads gradient and residual
    twice. The approximation is slightly worse, because the known factor is one step old.

    Args:
        rank: r, at least 1, for all variables or by layer kind (see `gc.Policy`; kinds not named
            keep the default). A larger rank follows dense training more closely; start with 4 for
            convolutional networks, with 32 for Transformers. A kind with None is summed whole.
        overrides: Rank or None by regular expression over variable paths, with precedence over
            `rank`; the first expression that is found anywhere in the path counts.
        alternate: Whether steps alternate between sending one factor and the other. On a GPU, the
            residual is then copied to the host in each step.
        **warmup: `warmup_steps` and `warmup`, as for every method: see `Compressor`.

    Raises:
        ValueError: If a rank or a layer kind is out of range, a pattern is not a regular
            expression, or `alternate` is not a bool.

    Reference:
        Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
        Optimization", NeurIPS 2019, https://arxiv.org/abs/1905.13727; and for `alternate` Zhang et
        al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning",
        ICDCS 2023, https://arxiv.org/abs/2306.08881
    """

    name = "power_sgd"

    def __init__(
        self,
        rank: int | Mapping[str, int | None] | None = 4,
        overrides: Mapping[str, int | None] | None = None,
        alternate: bool = False,
        **warmup: Any,
    ) -> None:
        super().__init__(**warmup)
        self.alternate = BOOL.checked("PowerSGD: alternate", alternate)
        self.has_gpu_kernels = not alternate
        self.rank = PerVariable("PowerSGD: rank", rank, _DEFAULT_RANKS, overrides, _RANK)
        self.overrides = self.rank.overrides

    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        """The rank of each variable; 0 if it is summed whole.

        A step may bring ranks up to the maximum that `state_for` received, because the factor has
        no more columns.
        """
        return [_effective(spec, self.rank.of(spec)) for spec in specs]

    def payload_bytes(self, specs: Sequence[GradientSpec]) -> int:
        """Returns the bytes of the factors, and of the tensors that are sent whole.

        With `alternate`, they are the mean of two steps.
        """
        ranks = tf.constant(self.settings(specs), tf.int64)
        tensor_bytes = _tensor_bytes(specs, ranks)
        if self.alternate:
            tensor_bytes = tf.where(ranks > SENT_WHOLE, tensor_bytes // 2, tensor_bytes)
        return int(tf.reduce_sum(tensor_bytes))

    def choices(self, spec: GradientSpec, values: Sequence[Any] | None = None) -> list[int] | None:
        """Ranks; by default from half to twice the own rank.

        Ranks that are too large become 0: whole.
        """
        (rank,) = self.settings([spec])
        if not rank or not is_planned(spec):
            return None
        if values is None:
            values = range(max(1, rank // 2), 2 * rank + 1)
        self.rank.check_choices(values)
        return distinct(_effective(spec, value) for value in values)

    def state(self, spec: GradientSpec) -> dict[str, StateSpec]:
        """The residual, and a factor for the next step: see `state_for`."""
        return self.state_for(spec, self.settings([spec]))

    def state_for(self, spec: GradientSpec, settings: Sequence[int]) -> dict[str, StateSpec]:
        """The residual, and a factor with as many columns as the largest rank.

        The factor is [m, r], or [n + m, r] with `alternate`. The shape is [0] for variables that
        are sent whole.
        """
        rank = max(settings)
        rows, columns = _matrix(spec)
        name, length = (ALTERNATING_FACTOR, rows + columns) if self.alternate else (FACTOR, columns)
        shape = (length, rank) if rank else (0,)
        return {**super().state(spec), name: StateSpec(shape, shared=True)}

    def costs(
        self, spec: GradientSpec, values: np.ndarray, settings: Sequence[int], replicas: int
    ) -> list[Cost]:
        """Returns bytes and errors; one decomposition serves all ranks.

        The error is the error of the best approximation. PowerSGD comes close to it, because each
        step begins with the factors of the step before.
        """
        if max(settings) == SENT_WHOLE:
            return [whole(spec)]
        matrix = values.reshape(-1, spec.shape[-1]).astype(np.float64)
        captured = np.cumsum(_captured(matrix, max(settings)))
        total = sum_of_squares(matrix)
        factors = 1 if self.alternate else 2

        def cost(rank: int) -> Cost:
            if rank == SENT_WHOLE:
                return whole(spec)
            sent = 2.0 * factors * rank * sum(matrix.shape)
            return sent, math.sqrt(max(0.0, total - captured[rank - 1]))

        return [cost(rank) for rank in settings]

    def reduce(self, inputs: StepInputs) -> Generator[AllReduce, tf.Tensor, Reduced]:
        """Sums left factors, then right ones (paper, Algorithms 1 and 2); or one of both."""
        ranks = self.settings_in_force(inputs)
        if self.alternate:
            return (yield from _sum_one_factor(inputs, ranks))
        residuals, factors, gradients = inputs.residuals, inputs.state[FACTOR], inputs.gradients
        left, local_finite = ops.power_sgd_left(
            residuals, gradients, factors, inputs.step, ranks=ranks
        )
        left_sum = yield AllReduce(left)
        left, right, finite = ops.power_sgd_right(residuals, gradients, left_sum, ranks=ranks)
        right_sum = yield from request_unless_empty(right, AllReduce)
        reduced, finite = ops.power_sgd_reduce(
            residuals,
            gradients,
            factors,
            left,
            right,
            right_sum,
            keep=local_finite,
            finite=tf.logical_and(finite, inputs.finite),
            ranks=ranks,
        )
        return Reduced(reduced, finite, _tensor_bytes(inputs.specs, ranks))


def _sum_one_factor(
    inputs: StepInputs, ranks: tf.Tensor
) -> Generator[AllReduce, tf.Tensor, Reduced]:
    """Sums for each variable the factor whose turn it is."""
    state = (inputs.residuals, inputs.gradients, inputs.state[ALTERNATING_FACTOR], inputs.step)
    factor, tensor_bytes, local_finite = ops.power_sgd_project(*state, ranks=ranks)
    total = yield AllReduce(factor)
    reduced, finite = ops.power_sgd_reduce_projected(
        *state, factor, total, keep=local_finite, finite=inputs.finite, ranks=ranks
    )
    return Reduced(reduced, finite, tensor_bytes)


def _tensor_bytes(specs: Sequence[GradientSpec], ranks: tf.Tensor) -> tf.Tensor:
    rank_1_elements = tf.constant([sum(_matrix(spec)) for spec in specs], tf.int64)
    elements = tf.constant([spec.elements for spec in specs], tf.int64)
    return 4 * tf.where(ranks > SENT_WHOLE, ranks * rank_1_elements, elements)


def _effective(spec: GradientSpec, rank: int | None) -> int:
    rows, columns = _matrix(spec)
    rank = rank or SENT_WHOLE
    # The rank is therefore also below the numbers of rows and columns.
    return rank if 2 * rank * (rows + columns) < rows * columns else SENT_WHOLE


def _matrix(spec: GradientSpec) -> tuple[int, int]:
    """Rows and columns of a variable as a matrix."""
    *rows, columns = spec.shape or (1,)
    return math.prod(rows), columns


def _captured(matrix: np.ndarray, rank: int) -> np.ndarray:
    """Returns the squares of the largest singular values, the largest first; float64 [rank]."""
    if len(matrix) < matrix.shape[1]:
        matrix = matrix.T
    if matrix.shape[1] > LARGEST_GRAM:
        basis = np.random.default_rng(0).standard_normal((matrix.shape[1], rank))
        for _ in range(_POWER_ITERATIONS):
            basis = np.linalg.qr(matrix.T @ (matrix @ basis))[0]
        matrix = matrix @ basis
    return np.linalg.eigvalsh(matrix.T @ matrix)[::-1][:rank]
