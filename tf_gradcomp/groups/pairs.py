"""Exchanges of vectors between two workers, without the other workers."""

from __future__ import annotations

import itertools

import tensorflow as tf

from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.private import tensorflow as tf_private

_FIRST_GROUP_KEY = 4_000_000  # far from the keys of other groups: see `tf_private`
_group_keys = itertools.count(_FIRST_GROUP_KEY)


class Pairs:
    """Exchanges vectors between two workers of a strategy, by a collective with a group of two.

    TensorFlow has no point-to-point messages for a strategy's workers. A worker can be in several
    pairs at the same time.

    Args:
        group: The workers. All workers create objects of this class in the same order.
    """

    def __init__(self, group: StrategyGroup) -> None:
        (own,) = group.communicators()
        self.rank, self.size = int(own.rank), group.size
        device = tf.DeviceSpec.from_string(group.devices[0])
        # Vectors are short, and NCCL needs all collectives of a GPU in one order.
        self._host = device.replace(device_type="CPU", device_index=0).to_string()
        self._seconds = tf_private.timeout_seconds(group.strategy)
        self._group_key = next(_group_keys)
        for _ in range(self.size**2 - 1):  # one key for each pair
            next(_group_keys)

    def swap(self, values: tf.Tensor, partner: int, number: tf.Tensor) -> tf.Tensor:
        """Returns the partner's vector.

        Args:
            values: float32 vector, as long as the partner's vector.
            partner: The partner's rank. The partner calls this with our rank.
            number: int32 scalar, equal on both partners and different in each call.
        """
        low, high = sorted((partner, self.rank))
        with tf.device(self._host):
            rows = tf.raw_ops.CollectiveGatherV2(
                # TensorFlow sorts the rows by device name, so each begins with its sender's rank.
                input=tf.concat([[tf.cast(self.rank, tf.float32)], values], 0)[tf.newaxis],
                group_size=2,
                group_key=self._group_key + low * self.size + high,
                instance_key=number,
                ordering_token=[],
                timeout_seconds=self._seconds,
            )
            index = tf.cast(tf.equal(rows[0, 0], tf.cast(self.rank, tf.float32)), tf.int32)
            return tf.ensure_shape(rows[index, 1:], values.shape)
