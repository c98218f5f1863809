"""The header of payloads whose body is plain TensorFlow: see docs/payload_format.md.

`tests.reference.payload` computes the same in NumPy.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_gradcomp.ops import library
from tf_gradcomp.ops.coding import Settings, tensor_of

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
    """Puts the header in front of a body.

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
    """Returns whether no payload has the non-finite flag; bool scalar.

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
