"""AdaComp: the ops of one step, fused for training and separate for research.

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
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp.ops import coding, library
from tf_gradcomp.ops.coding import Settings, handles_of
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
    """Packs the selected elements of each bin, as `ops.coding.encode` describes.

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
        residuals: See `ops.coding.encode`.
        gradients: See `ops.coding.encode`.
        step: See `ops.coding.encode`.
        bin_sizes: One per tensor, 1 to 16383, or 0 to send the tensor whole, as float32. Bin sizes
            may change between steps; the payload's header has a digest of them.
        fingerprint: See `ops.coding.encode`.
        scale_factor: s above, the weight of the gradient in the selection.
        second_moments: One per residual, of the same shape, to divide the gradients; or None.
    """
    adam = second_moments or _NONE
    return coding.encode(
        "ada_comp",
        residuals,
        gradients,
        step,
        second_moments=handles_of(adam.variables),
        adam_step=tf.convert_to_tensor(adam.step, tf.int64),
        squares=adam.squares_or_empty(),
        beta_2=adam.beta_2,
        epsilon=adam.epsilon,
        corrects_epsilon=adam.corrects_epsilon,
        scale=adam.scale,
        bin_sizes=bin_sizes,
        scale_factor=scale_factor,
        fingerprint=fingerprint,
    )


adacomp_decode = functools.partial(coding.decode, "ada_comp")
adacomp_put_back = functools.partial(coding.put_back, "ada_comp")
