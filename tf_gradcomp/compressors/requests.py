"""The requests by which compressors communicate."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import tensorflow as tf


class AllGather(NamedTuple):
    """Sends `payload` to all replicas, and asks for theirs.

    The answer is int32 [replicas, longest]: a row for each replica's payload, in the order of their
    ranks, with zeros behind the shorter ones.
    """

    payload: tf.Tensor  # int32 [words]
    same_length: bool = False  # whether it has as many words on all replicas, by construction


class AllReduce(NamedTuple):
    """Asks for the sum of what all replicas give.

    The answer has the dtype of `values`, and the same bits on all replicas. It has the shape of
    `values`, and the sum of the metadata behind them.
    """

    values: tf.Tensor  # [n], float32, float16, bfloat16 or int64; n is equal on all replicas, not 0
    metadata: tf.Tensor | None = None  # [m], of the same dtype; the exchange adds them


class Broadcast(NamedTuple):
    """Asks for what one replica gives; each step may name another replica.

    The answer has the shape of `payload`.
    """

    payload: tf.Tensor  # int32 [words], as many on all replicas, not 0; only the root's is used
    root: tf.Tensor  # int32 scalar, equal on all replicas: the rank of the one that gives


Request: TypeAlias = AllGather | AllReduce | Broadcast


def given(request: Request) -> tf.Tensor:
    """Returns the vector that a replica gives with a request; of a sum, without metadata."""
    return request.values if isinstance(request, AllReduce) else request.payload
