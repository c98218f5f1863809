"""AdaComp: the ops of one step, fused for training and one by one for research.

Source: Chen et al., "AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed
Training", AAAI 2018, https://arxiv.org/abs/1712.02679. The layout of a payload is documented in
docs/payload_format.md, and `tests.reference.adacomp` is the same in NumPy.

With r the residual and g the gradient of a variable, and s the scale factor:

    G = r + g                      accumulated
    H = G + (s - 1) g              boosted
    max_i = max |G| in bin i
    scale = mean of max_i over the bins
    sent: every element with |H| >= max_i and G != 0, as sign(G) * scale
    r <- G - what was sent

All arithmetic is float32, in this order, without fused multiply-add; only the mean is summed in
float64, in bin order. Results don't depend on the number of threads or on the processor.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp.ops import library
from tf_gradcomp.ops.handles import handles_of
from tf_gradcomp.ops.precondition import SecondMoments
from tf_gradcomp.ops.settings import Settings, tensor_of

_NONE = SecondMoments((), 1, beta_2=0.0, epsilon=1.0)


def residual_accumulate(
    residual: tf.Tensor, gradient: tf.Tensor, *, scale_factor: float = 2.0
) -> tuple[tf.Tensor, tf.Tensor]:
    """Adds the gradient into the residual, once and `scale_factor` times.

    Args:
        residual: float32, any shape.
        gradient: float32, float16 or bfloat16, same shape.
        scale_factor: How often the gradient counts in the selection.

    Returns:
        accumulated (G) and boosted (H), both float32 of the same shape.

    Raises:
        tf.errors.InvalidArgumentError: If the shapes differ.
    """
    return library.load().residual_accumulate(
        residual=residual, gradient=gradient, scale_factor=scale_factor
    )


def local_bin_select(
    accumulated: tf.Tensor, boosted: tf.Tensor, *, bin_size: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Selects, in each bin, the elements that are to be sent.

    Args:
        accumulated: float32 of any shape; bins run over it flattened, and the last may be short.
        boosted: float32, same shape.
        bin_size: Elements in a bin, at least 1.

    Returns:
        positions, int64 [number selected], into the flattened tensor, ascending; and bin_max,
        float32 [number of bins]. A bin with a value that is not finite selects nothing and has an
        infinite or NaN maximum.

    Raises:
        tf.errors.InvalidArgumentError: If the shapes differ or bin_size is below 1.
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
        shape of accumulated: what is left when signs * scale is sent.

    Raises:
        tf.errors.InvalidArgumentError: If positions are out of range or not ascending.
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
    """Packs the gradients of one step into one payload, and keeps the rest in the residuals.

    With second moments, the gradients are first divided as by `precondition`, to the bit, in the
    same pass over memory.

    If a residual plus gradient is not finite anywhere, the payload is a header with the non-finite
    flag, and the gradients are discarded. Residuals and second moments are as before, bit-equal if
    a gradient or its square is not finite. If only a residual plus gradient is not, then residuals
    are so in its bin, and elsewhere to the float32 rounding of r + g - g; second moments are at
    least 0 and at most what they were, and, where beta_2 is a half or more, less by at most 2^-19
    of what this step would have made of them.

    Args:
        residuals: float32 variables or their resource handles, updated in place.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        step: int64 scalar, the same on all replicas.
        bin_sizes: One per tensor, 1 to 16383, or 0 to send the tensor whole, as float32. They may
            change between steps; the header of the payload has a digest of them.
        fingerprint: Signed 64-bit; payloads with another one are refused by the decoder.
        scale_factor: How often the gradient counts in the selection.
        second_moments: One per residual, of the same shape, if the gradients are to be divided.

    Returns:
        payload, int32 [words]; and tensor_bytes, int64 [number of tensors]: the bytes of the
        payload that each tensor takes, which with the fixed header of 56 bytes are all of it.

    Raises:
        tf.errors.InvalidArgumentError: If shapes, types or bin sizes are wrong.
        tf.errors.FailedPreconditionError: If a variable is not initialized.
    """
    adam = second_moments or _NONE
    return library.load().ada_comp_encode(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        step=_step(step),
        second_moments=handles_of(adam.variables),
        adam_step=_step(adam.step),
        squares=adam.squares_or_empty(),
        beta_2=adam.beta_2,
        epsilon=adam.epsilon,
        corrects_epsilon=adam.corrects_epsilon,
        scale=adam.scale,
        bin_sizes=tensor_of(bin_sizes),
        scale_factor=scale_factor,
        fingerprint=fingerprint,
    )


def adacomp_decode(
    payloads: tf.Tensor,
    step: tf.Tensor | int,
    *,
    shapes: Sequence[tf.TensorShape | Sequence[int]],
    bin_sizes: Settings,
    fingerprint: int,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Adds up the payloads of all replicas.

    Args:
        payloads: int32 [replicas, words], a payload in each row, with zeros behind shorter ones.
        step: int64 scalar, the step that all of them must be of.
        shapes: The shapes of the tensors, fully known.
        bin_sizes: The same as for encoding.
        fingerprint: The same as for encoding.

    Returns:
        reduced, one float32 tensor per shape: the sum over the replicas, added in their order; and
        finite, bool scalar: whether no replica was flagged non-finite and no sum overflowed (if
        not, reduced are zeros).

    Raises:
        tf.errors.InvalidArgumentError: If a payload is broken, or of another program, step, plan or
            version. The message names the replica.
    """
    return library.load().ada_comp_decode(
        payloads=payloads,
        step=_step(step),
        N=len(shapes),
        shapes=list(shapes),
        bin_sizes=tensor_of(bin_sizes),
        fingerprint=fingerprint,
    )


def adacomp_put_back(
    residuals: Sequence[tf.Tensor | tf.Variable],
    payload: tf.Tensor,
    *,
    bin_sizes: Settings,
    fingerprint: int,
) -> tf.Operation | None:
    """Adds what a replica had packed back into its residuals, because the step is skipped.

    A payload with the non-finite flag puts nothing back.

    Args:
        residuals: float32 variables or their resource handles, updated in place.
        payload: int32 [words], the replica's own.
        bin_sizes: The same as for encoding.
        fingerprint: The same as for encoding.

    Returns:
        The operation in a graph, None in eager execution.

    Raises:
        tf.errors.InvalidArgumentError: If the payload is broken; the residuals are then untouched.
    """
    return library.load().ada_comp_put_back(
        residuals=handles_of(residuals),
        payload=payload,
        bin_sizes=tensor_of(bin_sizes),
        fingerprint=fingerprint,
    )


def _step(step: tf.Tensor | int) -> tf.Tensor:
    return tf.convert_to_tensor(step, tf.int64)
