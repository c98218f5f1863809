"""The interface that the payload ops of several methods share.

Each method has the ops `<method>_encode`, `<method>_decode` and `<method>_put_back`. Results depend
neither on the number of threads nor on the processor. The layout of a payload is in
docs/payload_format.md. A setting of each tensor may be a sequence or a tensor, and may change
between steps: the payload's header has a digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_gradcomp.ops import library

_PER_TENSOR = ("bin_sizes", "bits", "entries")


def encode(
    method: str,
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    step: tf.Tensor | int,
    **settings: Any,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Packs the gradients of one step into one payload, and keeps the rest in the residuals.

    Unless the method says otherwise, a residual plus gradient that is not finite leaves all
    residuals untouched. The gradients are then discarded, and the payload holds zeros and the
    non-finite flag.

    Args:
        method: The prefix of the op's name.
        residuals: float32 variables or their resource handles, updated in place.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        step: int64 scalar, the same on all replicas.
        settings: The method's own arguments. All methods have `fingerprint`, signed 64-bit: the
            decoder refuses payloads with another fingerprint.

    Returns:
        payload, int32 [words]; and tensor_bytes, int64 [number of tensors], the bytes that each
        tensor takes of the payload. The header takes the other 56 bytes.

    Raises:
        tf.errors.InvalidArgumentError: If shapes, types or settings are wrong.
        tf.errors.FailedPreconditionError: If a residual is not initialized.
    """
    return getattr(library.load(), f"{method}_encode")(
        residuals=handles_of(residuals),
        gradients=list(gradients),
        step=tf.convert_to_tensor(step, tf.int64),
        **_given(settings),
    )


def decode(
    method: str,
    payloads: tf.Tensor,
    step: tf.Tensor | int,
    *,
    shapes: Sequence[tf.TensorShape | Sequence[int]],
    **settings: Any,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Sums the payloads of all replicas, in the order of the replicas.

    Args:
        method: The prefix of the op's name.
        payloads: int32 [replicas, words], a payload in each row. Zeros fill the rows of shorter
            payloads.
        step: int64 scalar, the step in which all payloads must have been encoded.
        shapes: The shapes of the tensors, fully known.
        settings: The method's own arguments, as for encoding.

    Returns:
        reduced, the sums, one float32 tensor per shape; and finite, bool scalar. `finite` is false
        if a replica has set the non-finite flag or a sum overflows; `reduced` are then zeros.

    Raises:
        tf.errors.InvalidArgumentError: If a payload is broken, or comes from another program, step,
            plan or version. The message names the replica.
    """
    return getattr(library.load(), f"{method}_decode")(
        payloads=payloads,
        step=tf.convert_to_tensor(step, tf.int64),
        N=len(shapes),
        shapes=list(shapes),
        **_given(settings),
    )


def put_back(
    method: str,
    residuals: Sequence[tf.Tensor | tf.Variable],
    payload: tf.Tensor,
    **settings: Any,
) -> tf.Operation | None:
    """Adds a replica's own payload back into its residuals, because the step is skipped.

    A payload with the non-finite flag changes nothing.

    Args:
        method: The prefix of the op's name.
        residuals: float32 variables or their resource handles, updated in place.
        payload: int32 [words], the replica's own.
        settings: The method's own arguments, as for encoding.

    Returns:
        The operation in a graph, None in eager execution.

    Raises:
        tf.errors.InvalidArgumentError: If the payload is broken; the residuals are then untouched.
    """
    return getattr(library.load(), f"{method}_put_back")(
        residuals=handles_of(residuals), payload=payload, **_given(settings)
    )


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings as the ops take them."""
    return {
        name: tensor_of(value) if name in _PER_TENSOR else value for name, value in settings.items()
    }


Settings: TypeAlias = Sequence[int] | tf.Tensor | tf.Variable  # one for each tensor


def handles_of(variables: Sequence[tf.Tensor | tf.Variable]) -> list[tf.Tensor]:
    """Returns the resource handles of variables; a handle stays as it is."""
    return [variable.handle if hasattr(variable, "handle") else variable for variable in variables]


def tensor_of(settings: Settings) -> tf.Tensor:
    """Returns settings as int64 [tensors]."""
    if not isinstance(settings, (tf.Tensor, tf.Variable)):
        settings = list(settings)
    return tf.convert_to_tensor(settings, tf.int64)
