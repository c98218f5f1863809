"""The requests with which compressors communicate; they are checked when a step is traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

_SUMMED = (tf.float32, tf.float16, tf.bfloat16, tf.int64)


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Sends `payload` to all replicas, and asks for their payloads.

    The answer is int32 [replicas, longest]: a row for each replica's payload, in the order of
    ranks, with shorter payloads padded with zeros.
    """

    payload: tf.Tensor  # int32 [length]
    same_length: bool = False  # whether the length is equal on all replicas, by construction

    def __post_init__(self) -> None:
        check_tensor("AllGather.payload", self.payload, [tf.int32], [None])
        if not isinstance(self.same_length, bool):
            raise TypeError(f"AllGather.same_length must be a bool; received {self.same_length!r}.")

    @property
    def sent(self) -> tf.Tensor:
        """The vector that a replica sends."""
        return self.payload


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Asks for the sum of all replicas' vectors.

    The answer has the shape and dtype of `values`, and the same bits on all replicas.
    """

    values: tf.Tensor  # [n], float32, float16, bfloat16 or int64; n is equal on all replicas, not 0
    # [m], of the same dtype: numbers that the exchange sums along, behind the values.
    metadata: tf.Tensor | None = None

    def __post_init__(self) -> None:
        check_tensor("AllReduce.values", self.values, _SUMMED, [None])
        _check_not_empty("AllReduce.values", self.values)

    @property
    def sent(self) -> tf.Tensor:
        """The vector that a replica sends, without metadata."""
        return self.values


@dataclasses.dataclass(frozen=True)
class Broadcast:
    """Asks for the payload of one replica; each step may name another replica.

    The answer has the shape of `payload`.
    """

    payload: tf.Tensor  # int32 [length], not empty, of one length; only the root's is used
    root: tf.Tensor  # int32 scalar, equal on all replicas: the rank of the sender

    def __post_init__(self) -> None:
        check_tensor("Broadcast.payload", self.payload, [tf.int32], [None])
        _check_not_empty("Broadcast.payload", self.payload)
        check_tensor("Broadcast.root", self.root, [tf.int32], [])

    @property
    def sent(self) -> tf.Tensor:
        """The vector that a replica sends, if it is the root."""
        return self.payload


Request: TypeAlias = AllGather | AllReduce | Broadcast


def check_tensor(
    field: str, value: Any, dtypes: Sequence[tf.DType], shape: Sequence[int | None]
) -> None:
    """Refuses values other than tensors of one of the dtypes and of the shape, if known.

    Raises:
        TypeError: If `value` is not a tensor.
        ValueError: If it has another dtype or shape.
    """
    expected = f"must be a tensor of {' or '.join(dtype.name for dtype in dtypes)} and shape"
    if not tf.is_tensor(value):
        raise TypeError(f"{field} {expected} {tf.TensorShape(shape)}; received {value!r}.")
    if value.dtype not in dtypes or not value.shape.is_compatible_with(shape):
        raise ValueError(
            f"{field} {expected} {tf.TensorShape(shape)}; received {value.dtype.name} of shape "
            f"{value.shape}."
        )


def _check_not_empty(field: str, value: tf.Tensor) -> None:
    if value.shape.num_elements() == 0:
        raise ValueError(
            f"{field} must not be empty; send a vector that may be empty through "
            "`request_unless_empty` of compressors/aggregation.py."
        )
