"""Ops that select entries: AdaComp, top-k, SIDCo and the count sketch.

AdaComp: the ops of one step, fused for training and separate for research.

Source: Chen et al., "AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed
Training", AAAI 2018, https://arxiv.org/abs/1712.02679. `tests.reference.adacomp` computes the
same in NumPy.

With r the residual and g the gradient of a variable, and s the scale factor:

    G = r + g                      accumulated
    H = G + (s - 1) g              boosted
    max_i = max |G| in bin i
    scale = mean of max_i over the bins
    sent: every element with |H| >= max_i and G != 0, as sign(G) * scale
    r <- G - sent

All arithmetic is float32, in this order, without fused multiply-add. Only the mean is summed in
float64, in bin order. Results depend neither on the number of threads nor on the processor.

TopK: the ops of one step.

`tests.reference.top_k` computes the same in NumPy. Results depend neither on the number of threads
nor on the processor.

Source of the momentum correction: Lin et al., "Deep Gradient Compression: Reducing the
Communication Bandwidth for Distributed Training", ICLR 2018, https://arxiv.org/abs/1712.01887.

The ops of CountSketch: sketches of a vector, and the entries that are large in summed sketches.

Entry i of row r has word i of Philox 4x32-10 with the key `seed` and the counters from (r * 2^40,
step) on. Its lower 31 bits modulo the number of columns are the entry's column, and its highest bit
is the entry's sign. `tests.reference.count_sketch` computes the same in NumPy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_gradcomp.ops import library, payload
from tf_gradcomp.ops.payload import Settings, handles_of, tensor_of
from tf_gradcomp.ops.precondition import SecondMoments

_NONE = SecondMoments((), 1, beta_2=0.0, epsilon=1.0)


def residual_accumulate(
    residual: tf.Tensor, gradient: tf.Tensor, *, scale_factor: float = 2.0
) -> tuple[tf.Tensor, tf.Tensor]:
    """Adds the gradient into the residual, once and `scale_factor` times.

    Args:
        residual: float32, any shape.
        gradient: float32, float16 or bfloat16, same shape.
        scale_factor: s above, the weight of the gradient in the selection.

    Returns:
        accumulated (G) and boosted (H), both float32 of the same shape.
    """
    return library.load().residual_accumulate(
        residual=residual, gradient=gradient, scale_factor=scale_factor
    )


def local_bin_select(
    accumulated: tf.Tensor, boosted: tf.Tensor, *, bin_size: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Selects the elements to send in each bin.

    Args:
        accumulated: float32 of any shape; bins run over it flattened, and the last may be short.
        boosted: float32, same shape.
        bin_size: Elements in a bin, at least 1.

    Returns:
        positions, int64 [number selected], into the flattened tensor, ascending; and bin_max,
        float32 [number of bins]. In a bin with a value that is not finite, nothing is selected and
        the maximum is infinite or NaN.
    """
    return library.load().local_bin_select(
        accumulated=accumulated, boosted=boosted, bin_size=bin_size
    )


def ternary_quantize(
    accumulated: tf.Tensor, positions: tf.Tensor, bin_max: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Quantizes the selected elements to -scale, 0 or scale, and keeps the rest.

    Args:
        accumulated: float32 of any shape.
        positions: int64 [k], into the flattened tensor, ascending.
        bin_max: float32 [number of bins].

    Returns:
        signs, int8 [k]; scale, float32 scalar, the mean of bin_max; and residual, float32 of the
        shape of accumulated: the values left unsent once signs * scale are sent.
    """
    return library.load().ternary_quantize(
        accumulated=accumulated, positions=positions, bin_max=bin_max
    )


def adacomp_encode(
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    step: tf.Tensor | int,
    *,
    bin_sizes: Settings,
    fingerprint: int,
    scale_factor: float = 2.0,
    second_moments: SecondMoments | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Packs the selected elements of each bin.

    On a CPU, a new residual takes over the memory of its gradient if nothing else uses that memory,
    and the gradient is float32 and not divided.

    With second moments, the gradients are first divided as by `precondition`, to the bit, in the
    same pass over memory.

    If a residual plus gradient is not finite anywhere, the payload is a header with the non-finite
    flag, and the gradients are discarded. If a gradient or its square is not finite, residuals and
    second moments keep their old values to the bit. If all gradients are finite but some residual
    plus gradient is not, the residuals in its bin keep their old values; other residuals become r +
    g - g in float32. Second moments then stay between 0 and their old values. With beta_2 of a half
    or more, they shrink by at most 2^-19 of the value that this step would have given them.

    Args:
        residuals: float32 variables or their resource handles, updated in place.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        step: int64 scalar, the same on all replicas.
        bin_sizes: One per tensor, 1 to 16383, or 0 to send the tensor whole, as float32. Bin sizes
            may change between steps; the payload's header has a digest of them.
        fingerprint: Signed 64-bit; the decoder refuses payloads with another fingerprint.
        scale_factor: s above, the weight of the gradient in the selection.
        second_moments: One per residual, of the same shape, to divide the gradients; or None.

    Returns:
        payload, int32 [length]; and tensor_bytes, int64 [tensors], the bytes that each tensor takes
        of the payload. The header takes the other 56 bytes.
    """
    adam = second_moments or _NONE
    return library.load().ada_comp_encode(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        step=tf.convert_to_tensor(step, tf.int64),
        second_moments=handles_of(adam.variables),
        adam_step=tf.convert_to_tensor(adam.step, tf.int64),
        squares=adam.squares_or_empty(),
        beta_2=adam.beta_2,
        epsilon=adam.epsilon,
        corrects_epsilon=adam.corrects_epsilon,
        scale=adam.scale,
        bin_sizes=tensor_of(bin_sizes),
        scale_factor=scale_factor,
        fingerprint=fingerprint,
    )


adacomp_decode = functools.partial(payload.decode, "ada_comp")
adacomp_put_back = functools.partial(payload.put_back, "ada_comp")


def momentum_correction(
    velocities: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor],
    *,
    momentum: float,
    clip_norm: float = math.inf,
) -> list[tf.Tensor]:
    """Clips the gradients of a replica and adds them to its decayed velocities.

    All arithmetic is float32, without fused multiply-add; the norm is summed in float64, in a fixed
    order.

    Args:
        velocities: float32, one per gradient in its shape; or an empty list.
        gradients: float32, float16 or bfloat16, any shapes.
        momentum: The factor of the velocities.
        clip_norm: The largest global norm of the gradients; larger gradients are scaled down to it.

    Returns:
        For each gradient g with velocity u: momentum u + scale g, float32 (paper, section 3.2); or
        scale g without velocities. Not finite where g is not.

    Raises:
        tf.errors.InvalidArgumentError: If shapes or numbers of tensors differ.
    """
    return library.load().momentum_correction(
        velocities=list(velocities),
        gradients=list(gradients),
        N=len(gradients),
        momentum=momentum,
        clip_norm=clip_norm,
    )


def top_k_encode(
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    step: tf.Tensor | int,
    *,
    entries: Settings,
    fingerprint: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Packs the largest entries of residuals plus gradients.

    Among entries with equal magnitudes, the first are sent. A tensor takes 2 words of the payload
    for each entry, or one word for each element if it is sent whole.

    Args:
        residuals: float32 variables or their resource handles, updated in place.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        step: int64 scalar, the same on all replicas.
        entries: The number of entries to send of each tensor, or 0 to send the tensor whole,
            without indices. The numbers may change between steps; the payload's header has a digest
            of them.
        fingerprint: Signed 64-bit; the decoder refuses payloads with another fingerprint.

    Returns:
        payload, int32 [length]; and tensor_bytes, int64 [tensors], the bytes that each tensor takes
        of the payload. The header takes the other 56 bytes.
    """
    return library.load().top_k_encode(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        step=tf.convert_to_tensor(step, tf.int64),
        entries=tensor_of(entries),
        fingerprint=fingerprint,
    )


top_k_decode = functools.partial(payload.decode, "top_k")
top_k_put_back = functools.partial(payload.put_back, "top_k")


def top_k_keep_velocity(
    velocities: Sequence[tf.Tensor | tf.Variable],
    corrected: Sequence[tf.Tensor],
    payload: tf.Tensor,
    sent: tf.Tensor,
    *,
    entries: Settings,
    fingerprint: int,
) -> tf.Operation | None:
    """Ends a step of momentum: stores the corrected gradients as velocities, masked where sent.

    A replica whose payload has the non-finite flag keeps its old velocities.

    Args:
        velocities: float32 variables or their resource handles, updated in place.
        corrected: The result of `momentum_correction`.
        payload: int32 [words], the replica's own, encoded from `corrected`.
        sent: bool scalar: whether the step is taken. Velocities then become zero where the payload
            names an entry (paper, section 3.3: momentum factor masking). The velocities of tensors
            sent whole stay, because none of their entries is delayed.
        entries: The same as for encoding.
        fingerprint: The same as for encoding.

    Returns:
        The operation in a graph, None in eager execution.

    Raises:
        tf.errors.InvalidArgumentError: If the payload is broken; the velocities are then untouched.
    """
    return library.load().top_k_keep_velocity(
        velocities=handles_of(velocities),
        corrected=list(corrected),
        payload=payload,
        sent=sent,
        entries=tensor_of(entries),
        fingerprint=fingerprint,
    )


def sidco_choose(values: tf.Tensor, density: float) -> tf.Tensor:
    """Finds about the largest entries, by fits of a generalized Pareto distribution to magnitudes.

    Each stage fits the distribution to the magnitudes above the threshold of the stage before, and
    takes its quantile as the next threshold (Abdelmoniem et al., MLSys 2021, arXiv 2101.10761).
    Unlike in the paper, the last threshold is corrected three times by the number of entries above
    it. Zeros are never chosen. Among at most 1023 values, the largest are chosen exactly.

    Args:
        values: float32, finite, fewer than 2^31.
        density: The target share of chosen entries, above 0 and below 1.

    Returns:
        The indices of the chosen entries, ascending, int32: at most twice the share or 64 of them,
        and at least one, unless all values are zero.

    Raises:
        tf.errors.InvalidArgumentError: If `density` is out of range.
    """
    return library.load().sidco_choose(values=values, density=tf.constant(density, tf.float64))


class SketchSettings(NamedTuple):
    """The settings of a sketch.

    Attributes:
        step: int64 scalar; each step draws another sketch.
        columns: Sums in each of the three rows.
    """

    step: tf.Tensor
    columns: int


def count_sketch(values: tf.Tensor, settings: SketchSettings) -> tf.Tensor:
    """Adds each entry, with a random sign, to a random sum of each row.

    Args:
        values: float32; the entries are added in their order.
        settings: Equal on all replicas that sum their sketches.

    Returns:
        float32 [3 * columns], row by row.
    """
    return library.load().count_sketch(values=values, **settings._asdict())


def count_sketch_largest(
    sums: tf.Tensor, settings: SketchSettings, *, size: int, count: int
) -> tf.Tensor:
    """Finds the entries whose estimates have the largest magnitudes.

    An estimate is the median over the rows of the entry's sum with its sign. A sum of NaN, which
    overflows make, counts as infinite.

    Args:
        sums: float32 [3 * columns], the sum of sketches.
        settings: Settings of the sketches.
        size: Entries in each sketched vector, below 2^31.
        count: Entries to find, up to `size`.

    Returns:
        Their positions, int32 [count], by descending magnitude; of equal magnitudes, the first.
    """
    return library.load().count_sketch_largest(
        sums=sums, size=size, count=count, **settings._asdict()
    )
