"""Ops on payloads: their header, the sums of gathered payloads, and checks of equality.

An encoder (`adacomp_encode`, `top_k_encode`, `qsgd_encode`, `sign_sgd_encode`) packs the gradients
of one step into one payload, and keeps the rest in the residuals. Unless the method says otherwise,
a residual plus gradient that is not finite leaves all residuals untouched. The gradients are then
discarded, and the payload holds zeros and the non-finite flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_gradcomp.ops import library

TOP_K, SCALECOM, LGC, SIDCO, MAX_NORM = 4, 5, 6, 7, 8  # numbers of methods
_FLAGS = 8  # the header word with the flags


def payload_write(
    body: tf.Tensor,
    step: tf.Tensor,
    finite: tf.Tensor,
    *,
    settings: Settings | None,
    method: int,
    fingerprint: int,
    num_tensors: int | None = None,
    same_length: bool = True,
) -> tf.Tensor:
    """Prepends the header to a payload's body.

    Args:
        body: int32 [words].
        step: int64 scalar, the same on all replicas.
        finite: bool scalar. If false, the payload has the non-finite flag, and zeros as its body;
            without `same_length`, it has no body.
        settings: One per tensor; the header has a digest of them. None: the method has none.
        method: The number of the method.
        fingerprint: Signed 64-bit; the reader refuses payloads with another fingerprint.
        num_tensors: The number of tensors of a method without settings.
        same_length: Whether the payloads of all replicas are equally long, as for `AllGather`.

    Returns:
        int32 [words + 14]; of a replica that is not finite, without `same_length`, int32 [14].
    """
    return library.load().payload_write(
        body=body,
        step=step,
        finite=finite,
        method=method,
        fingerprint=fingerprint,
        same_length=same_length,
        **_tensors(settings, num_tensors),
    )


def payload_read(
    payloads: tf.Tensor,
    step: tf.Tensor,
    *,
    settings: Settings | None,
    method: int,
    fingerprint: int,
    num_tensors: int | None = None,
    same_length: bool = True,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Checks and removes the headers of all replicas' payloads.

    Args:
        payloads: int32 [replicas, words + 14], a payload in each row, with zeros behind shorter
            ones. With `same_length`, the payloads fill their rows.
        step: int64 scalar, the step in which all payloads must have been encoded.
        settings: The same as for writing.
        method: The same as for writing.
        fingerprint: The same as for writing.
        num_tensors: The same as for writing.
        same_length: The same as for writing.

    Returns:
        The bodies, int32 [replicas, words], with zeros behind shorter ones; finite, bool scalar:
        whether no replica was flagged non-finite; and the words of each body, int64 [replicas].

    Raises:
        tf.errors.InvalidArgumentError: If a payload is broken, or comes from another program, step,
            plan or version. The message names the replica.
    """
    return library.load().payload_read(
        payloads=payloads,
        step=step,
        method=method,
        fingerprint=fingerprint,
        same_length=same_length,
        **_tensors(settings, num_tensors),
    )


def _tensors(settings: Settings | None, num_tensors: int | None) -> dict[str, Any]:
    """Returns the ops' arguments for the number of tensors and their settings."""
    if (settings is None) == (num_tensors is None):
        raise ValueError("A payload needs either the settings of its tensors or their number.")
    if settings is None:
        return {"settings": tensor_of([]), "num_tensors": num_tensors}
    return {"settings": tensor_of(settings)}


def payloads_finite(payloads: tf.Tensor) -> tf.Tensor:
    """Whether no payload has the non-finite flag; bool scalar.

    Args:
        payloads: int32 [replicas, words], payloads of any method, checked by its decoder.
    """
    return tf.reduce_all(each_finite(payloads))


def each_finite(payloads: tf.Tensor) -> tf.Tensor:
    """Returns which payloads lack the non-finite flag; bool [replicas].

    Args:
        payloads: As for `payloads_finite`.
    """
    return tf.equal(payloads[:, _FLAGS], 0)


def pass_if_equal(
    value: tf.Tensor, actual: tf.Tensor, expected: tf.Tensor, message: str
) -> tf.Tensor:
    """Returns `value`, unless `actual` and `expected` differ.

    `tf.debugging.assert_equal` has a side effect, so TensorFlow runs all such checks of a graph in
    sequence. With several replicas in one process, the check of one replica would wait for the
    check of another, which waits for a collective that both must have begun.

    Args:
        value: A tensor of any shape and dtype.
        actual: float32.
        expected: float32, in the same shape.
        message: The message of the error.

    Raises:
        tf.errors.InvalidArgumentError: If they differ, or one has a NaN; only where the returned
            tensor is used.
    """
    return library.load().pass_if_equal(
        value=value, actual=actual, expected=expected, message=message
    )


_PER_TENSOR = ("bin_sizes", "bits", "entries")


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
        **_op_arguments(settings),
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
        residuals=handles_of(residuals), payload=payload, **_op_arguments(settings)
    )


def _op_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a method's settings as its op takes them: lists by tensor become int64 tensors."""
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
