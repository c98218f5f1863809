"""Traffic of a replica: the bytes that it has exchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_gradcomp.groups.communicator import Sent


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Traffic of one replica so far; bytes are totals over `exchanges` steps."""

    exchanges: int
    payload_bytes: int
    sent_bytes: int
    dense_bytes: int
    tensor_bytes: dict[str, int]  # of the payload, by variable path

    def since(self, earlier: Traffic) -> Traffic:
        """Returns the traffic after `earlier`."""
        return Traffic(
            self.exchanges - earlier.exchanges,
            self.payload_bytes - earlier.payload_bytes,
            self.sent_bytes - earlier.sent_bytes,
            self.dense_bytes - earlier.dense_bytes,
            {path: n - earlier.tensor_bytes.get(path, 0) for path, n in self.tensor_bytes.items()},
        )


class TrafficCounter:
    """Counts for each local replica; a plain object, so that no checkpoint holds the totals."""

    def __init__(self, tensors: int) -> None:
        # exchanges, payload bytes, sent bytes, dense bytes, then the bytes of each tensor
        self.totals = tf.Variable(
            np.zeros(4 + tensors, np.int64),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    @staticmethod
    def read(totals: tf.Variable, paths: Sequence[str]) -> Traffic:
        """A replica's totals."""
        exchanges, payload, sent, dense, *tensors = map(int, totals.numpy())
        return Traffic(exchanges, payload, sent, dense, dict(zip(paths, tensors, strict=True)))

    @staticmethod
    def add(
        totals: tf.Variable,
        sent: Sent,
        dense_bytes: int,
        indices: Sequence[int],
        tensor_bytes: tf.Tensor,
    ) -> None:
        """Adds the bytes of some tensors in a step to a replica's totals."""
        tensors = totals.shape[0] - 4
        if list(indices) != list(range(tensors)):
            places = tf.constant([[index] for index in indices])
            tensor_bytes = tf.scatter_nd(places, tensor_bytes, [tensors])
        head = tf.stack([tf.constant(0, tf.int64), *sent, tf.constant(dense_bytes, tf.int64)])
        totals.assign_add(tf.concat([head, tensor_bytes], 0))

    @staticmethod
    def count_exchange(totals: tf.Variable) -> None:
        """Counts a step."""
        totals.assign_add(tf.one_hot(0, totals.shape[0], dtype=tf.int64))
