"""The wishes of compressors: what they may ask to have communicated."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import tensorflow as tf


class AllGather(NamedTuple):
    """A compressor's wish: to send `payload` to all replicas and to have theirs.

    The answer is int32 [replicas, longest]: a row for each replica's payload, in the order of their
    ranks, with zeros behind the shorter ones.
    """

    payload: tf.Tensor  # int32 [words]
    same_length: bool = False  # whether it has as many words on all replicas, by construction


class AllReduce(NamedTuple):
    """A compressor's wish: to have the sum of what all replicas give.

    The answer has the shape and dtype of `values`, and the same bits on all replicas.
    """

    values: tf.Tensor  # [n], float32, float16 or bfloat16; n is equal on all replicas, not 0


class Broadcast(NamedTuple):
    """A compressor's wish: to have what one of the replicas gives, perhaps another in each step.

    The answer has the shape of `payload`.
    """

    payload: tf.Tensor  # int32 [words], as many on all replicas, not 0; only the root's is used
    root: tf.Tensor  # int32 scalar, equal on all replicas: the rank of the one that gives


class WithRider(NamedTuple):
    """A wish with which a few more numbers travel, in the same collective.

    The answer is a pair: the answer to the wish; and the riders, as a row for each replica if the
    wish gathers, or as their sum if it sums.
    """

    wish: AllGather | AllReduce
    rider: tf.Tensor  # [n], not empty: int32 if the wish gathers, otherwise the dtype of its values


Wish: TypeAlias = AllGather | AllReduce | Broadcast | WithRider


def given(wish: Wish) -> tf.Tensor:
    """The vector that a replica gives with a wish, without a rider."""
    if isinstance(wish, WithRider):
        wish = wish.wish
    return wish.values if isinstance(wish, AllReduce) else wish.payload
