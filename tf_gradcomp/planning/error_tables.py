"""What each setting of a layer sends, and what it misses: one pass over a gradient per layer.

Errors are L2 norms of the gradient minus what a method sends of it, from a residual of zeros. Bytes
are those of the payload, as `Exchanged.tensor_bytes` counts them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors import QSGD, AdaComp, Compressor, PowerSGD, ScaleCom, TopK
from tf_gradcomp.compressors.choices import distinct
from tf_gradcomp.compressors.chunked import tensor_bytes
from tf_gradcomp.policy import GradientSpec

SENT_WHOLE = 0  # the setting of TopK, PowerSGD and QSGD; the others' own ops know theirs
LARGEST_GRAM = 2048  # rows of a matrix whose eigenvalues are computed
_POWER_ITERATIONS = 5
Costs = list[tuple[float, float]]  # by setting: bytes and error


class Table(NamedTuple):
    """One layer's choices.

    Attributes:
        settings: As `Compressor.settings` has them.
        bytes: float64 [settings], of the payload.
        errors: float64 [settings]; NaN if the gradient is not finite.
        default: The place of the uniform setting among them.
    """

    settings: list[int]
    bytes: np.ndarray
    errors: np.ndarray
    default: int


def table(
    compressor: Compressor,
    spec: GradientSpec,
    gradient: np.ndarray,
    choices: Sequence[int],
    default: int,
    replicas: int = 1,
) -> Table:
    """What one layer would send and miss at each of some settings.

    Args:
        compressor: The method.
        spec: What is known of the layer's gradient.
        gradient: In the shape of `spec`; any float.
        choices: Settings as `Compressor.settings` has them.
        default: The uniform setting, which need not be among them.
        replicas: How many there are. Where one of them leads, bytes are the mean over all.

    Returns:
        The choices in their order, then the uniform setting if it is not among them.
    """
    settings = distinct([*choices, default])
    values = np.asarray(gradient, np.float32)
    finite = bool(np.isfinite(values).all())
    values = values if finite else np.zeros_like(values)
    values, exponent = _scaled(values)
    costs = _costs(compressor, spec, values, settings, replicas)
    sizes, errors = (np.array(column, np.float64) for column in zip(*costs, strict=True))
    errors = np.ldexp(errors, exponent) if finite else np.full_like(errors, np.nan)
    return Table(settings, sizes, errors, settings.index(default))


def _scaled(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Divides by a power of two so that the largest magnitude is from 0.5 to 1; also its exponent.

    Squares of small values would be zero in float32, and sums of large ones infinite.
    """
    exponent = int(np.frexp(np.abs(values).max(initial=0))[1])
    return np.ldexp(values, -exponent), exponent


@functools.singledispatch
def _costs(
    compressor: Compressor, spec: GradientSpec, values: np.ndarray, settings: Sequence[int], _: int
) -> Costs:
    raise ValueError(f"{compressor!r} has no table of errors, and so cannot be planned.")


@_costs.register
def _top_k(
    compressor: TopK, spec: GradientSpec, values: np.ndarray, settings: Sequence[int], _: int
) -> Costs:
    """One sort of the magnitudes serves all numbers of entries."""
    sums = np.square(np.sort(np.abs(values), axis=None), dtype=np.float64)
    np.cumsum(sums, out=sums)

    def cost(entries: int) -> tuple[float, float]:
        if entries == SENT_WHOLE:
            return _whole(spec)
        left = max(0, spec.elements - entries)
        return 8.0 * (spec.elements - left), math.sqrt(sums[left - 1]) if left else 0.0

    return [cost(entries) for entries in settings]


@_costs.register
def _power_sgd(
    compressor: PowerSGD, spec: GradientSpec, values: np.ndarray, settings: Sequence[int], _: int
) -> Costs:
    """One decomposition serves all ranks: the error of the best approximation.

    PowerSGD comes close to it, for each step begins with the factors of the step before.
    """
    if max(settings) == SENT_WHOLE:
        return [_whole(spec)]
    matrix = values.reshape(-1, spec.shape[-1]).astype(np.float64)
    captured = np.cumsum(_captured(matrix, max(settings)))
    total = _sum_of_squares(matrix)

    def cost(rank: int) -> tuple[float, float]:
        if rank == SENT_WHOLE:
            return _whole(spec)
        return 4.0 * rank * sum(matrix.shape), math.sqrt(max(0.0, total - captured[rank - 1]))

    return [cost(rank) for rank in settings]


def _captured(matrix: np.ndarray, rank: int) -> np.ndarray:
    """Squares of the largest singular values, the largest first; float64 [rank]."""
    if len(matrix) < matrix.shape[1]:
        matrix = matrix.T
    if matrix.shape[1] > LARGEST_GRAM:
        basis = np.random.default_rng(0).standard_normal((matrix.shape[1], rank))
        for _ in range(_POWER_ITERATIONS):
            basis = np.linalg.qr(matrix.T @ (matrix @ basis))[0]
        matrix = matrix @ basis
    return np.linalg.eigvalsh(matrix.T @ matrix)[::-1][:rank]


@_costs.register
def _qsgd(
    compressor: QSGD, spec: GradientSpec, values: np.ndarray, settings: Sequence[int], _: int
) -> Costs:
    """The error of rounding; where that is random, the root of the expected square."""
    bucket_size = compressor.bucket_size
    errors = ops.qsgd_errors(
        values, settings, bucket_size=bucket_size, stochastic=compressor.stochastic
    )

    def cost(bits: int, error: float) -> tuple[float, float]:
        if bits == SENT_WHOLE:
            return _whole(spec)
        scales = 8 * -(-spec.elements // bucket_size)
        return float(scales + 4 * -(-bits * spec.elements // 32)), error

    return list(map(cost, settings, errors.numpy().tolist()))


@_costs.register
def _adacomp(
    compressor: AdaComp, spec: GradientSpec, values: np.ndarray, settings: Sequence[int], _: int
) -> Costs:
    """What its encoder packs, and leaves in a residual of zeros."""
    zeros = tf.zeros(spec.shape)
    residual = tf.Variable(zeros)
    gradient = tf.constant(values)

    def cost(bin_size: int) -> tuple[float, float]:
        residual.assign(zeros)
        _, sent = ops.adacomp_encode(
            [residual],
            [gradient],
            0,
            bin_sizes=[bin_size],
            scale_factor=compressor.scale_factor,
            fingerprint=0,
        )
        return float(sent[0]), math.sqrt(2 * float(tf.nn.l2_loss(residual)))

    return [cost(bin_size) for bin_size in settings]


@_costs.register
def _scalecom(
    compressor: ScaleCom,
    spec: GradientSpec,
    values: np.ndarray,
    settings: Sequence[int],
    replicas: int,
) -> Costs:
    """What it misses as the leader of a step, but for what rounding takes off."""
    residual = tf.Variable(tf.zeros(spec.shape))
    gradient = tf.constant(values)
    total = _sum_of_squares(values)

    def error(rate: int) -> float:
        chunked = ops.Chunked([residual], [gradient], [rate], [0])
        offsets, finite = ops.chunk_select(chunked, lead=True)
        sent = ops.chunk_take(chunked, offsets, finite).numpy()
        return math.sqrt(max(0.0, total - _sum_of_squares(sent)))

    each_alone = ops.Chunked([], [], settings, range(len(settings)))
    elements = [spec.elements] * len(settings)
    sizes = tensor_bytes(each_alone, elements, leaders=replicas, value_bits=compressor.value_bits)
    return list(zip(sizes.numpy().tolist(), map(error, settings), strict=True))


def _sum_of_squares(values: np.ndarray) -> float:
    return float(np.sum(np.square(values, dtype=np.float64)))


def _whole(spec: GradientSpec) -> tuple[float, float]:
    """Bytes and error of a layer that is sent as it is."""
    return 4.0 * spec.elements, 0.0
