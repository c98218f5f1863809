"""The header of payloads whose body is plain TensorFlow: see docs/payload_format.md.

`tests.reference.payload` computes the same in NumPy.
"""

from __future__ import annotations

import tensorflow as tf

from tf_gradcomp.ops import library
from tf_gradcomp.ops.coding import Settings, tensor_of

TOP_K, SCALECOM, LGC = 4, 5, 6  # numbers of methods
_FLAGS = 8  # the header word with the flags


def payload_write(
    body: tf.Tensor,
    step: tf.Tensor,
    finite: tf.Tensor,
    *,
    settings: Settings,
    method: int,
    fingerprint: int,
) -> tf.Tensor:
    """Puts the header in front of a body.

    Args:
        body: int32 [words].
        step: int64 scalar, the same on all replicas.
        finite: bool scalar. If false, the payload has the non-finite flag, and zeros as its body.
        settings: One per tensor; the header has a digest of them.
        method: The number of the method.
        fingerprint: Signed 64-bit; the reader refuses payloads with another fingerprint.

    Returns:
        int32 [words + 14].
    """
    return library.load().payload_write(
        body=body,
        step=step,
        finite=finite,
        settings=tensor_of(settings),
        method=method,
        fingerprint=fingerprint,
    )


def payload_read(
    payloads: tf.Tensor, step: tf.Tensor, *, settings: Settings, method: int, fingerprint: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Checks and removes the headers of all replicas' payloads, which fill their rows.

    Args:
        payloads: int32 [replicas, words + 14], a payload in each row.
        step: int64 scalar, the step in which all payloads must have been encoded.
        settings: The same as for writing.
        method: The same as for writing.
        fingerprint: The same as for writing.

    Returns:
        The bodies, int32 [replicas, words]; and finite, bool scalar: whether no replica was
        flagged non-finite.

    Raises:
        tf.errors.InvalidArgumentError: If a payload is broken, or comes from another program, step,
            plan or version. The message names the replica.
    """
    return library.load().payload_read(
        payloads=payloads,
        step=step,
        settings=tensor_of(settings),
        method=method,
        fingerprint=fingerprint,
    )


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
