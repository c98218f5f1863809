"""The requests with which compressors communicate."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import tensorflow as tf


class AllGather(NamedTuple):
    """Sends `payload` to all replicas, and asks for their payloads.

    The answer is int32 [replicas, longest]: a row for each replica's payload, in the order of
    ranks, with shorter payloads padded with zeros.
    """

    payload: tf.Tensor  # int32 [words]
    same_length: bool = False  # whether the length is equal on all replicas, by construction


class AllReduce(NamedTuple):
    """Asks for the sum of all replicas' vectors.

    The answer has the dtype of `values`, and the same bits on all replicas. The answer has the
    shape of `values`, followed by the sum of the metadata.
    """

    values: tf.Tensor  # [n], float32, float16, bfloat16 or int64; n is equal on all replicas, not 0
    metadata: tf.Tensor | None = None  # [m], of the same dtype; set by the exchange


class Broadcast(NamedTuple):
    """Asks for the payload of one replica; each step may name another replica.

    The answer has the shape of `payload`.
    """

    payload: tf.Tensor  # int32 [words], not empty, equally long everywhere; only the root's is used
    root: tf.Tensor  # int32 scalar, equal on all replicas: the rank of the sender


Request: TypeAlias = AllGather | AllReduce | Broadcast


def given(request: Request) -> tf.Tensor:
    """Returns the vector that a replica sends with a request; for a sum, without metadata."""
    return request.values if isinstance(request, AllReduce) else request.payload
