"""What a replica has exchanged so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tf_gradcomp.distribute.communicator import Sent


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one replica has exchanged so far; bytes are totals over `exchanges` steps."""

    exchanges: int
    payload_bytes: int
    sent_bytes: int
    dense_bytes: int
    tensor_bytes: dict[str, int]  # of the payload, by variable path

    def since(self, earlier: Traffic) -> Traffic:
        """What was exchanged after `earlier`."""
        return Traffic(
            self.exchanges - earlier.exchanges,
            self.payload_bytes - earlier.payload_bytes,
            self.sent_bytes - earlier.sent_bytes,
            self.dense_bytes - earlier.dense_bytes,
            {path: n - earlier.tensor_bytes.get(path, 0) for path, n in self.tensor_bytes.items()},
        )


class TrafficCounter:
    """Totals of each local replica: a plain object, so that no checkpoint holds them."""

    def __init__(self, tensors: int) -> None:
        # exchanges, payload bytes, sent bytes, dense bytes, then the bytes of each tensor
        self.totals = tf.Variable(
            np.zeros(4 + tensors, np.int64),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    @staticmethod
    def add(
        totals: tf.Variable,
        sent: Sent,
        dense_bytes: int,
        indices: Sequence[int],
        tensor_bytes: tf.Tensor,
        exchanges: int = 1,
    ) -> None:
        """Adds one step of some of the tensors to a replica's totals."""
        places = tf.constant([[index] for index in indices])
        spread = tf.scatter_nd(places, tensor_bytes, [totals.shape[0] - 4])
        head = tf.stack(
            [
                tf.constant(exchanges, tf.int64),
                *sent,
                tf.constant(dense_bytes, tf.int64),
            ]
        )
        totals.assign_add(tf.concat([head, spread], 0))

    @staticmethod
    def add_slices(
        totals: tf.Variable,
        slices: Mapping[int, tf.IndexedSlices],
        dense_bytes: int,
        replicas: int,
        *,
        counted: bool,
    ) -> None:
        """Adds what travels sparse and uncompressed in one step to a replica's totals.

        Args:
            totals: The replica's.
            slices: What it gives to be gathered, by the index of its tensor.
            dense_bytes: Of the whole tables as float32.
            replicas: Of the job; gathering, a ring passes on what all others but one give.
            counted: Whether this step's exchange is counted already.
        """
        given = [_bytes(part.values) + _bytes(part.indices) for part in slices.values()]
        payload = tf.add_n(given)
        sent = Sent(payload, (replicas - 1) * payload)
        exchanges = 0 if counted else 1
        TrafficCounter.add(totals, sent, dense_bytes, list(slices), tf.stack(given), exchanges)


def _bytes(tensor: tf.Tensor) -> tf.Tensor:
    return tensor.dtype.size * tf.size(tensor, tf.int64)
