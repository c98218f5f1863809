"""Pairs of workers that exchange a vector, without the others."""

from __future__ import annotations

import itertools

import tensorflow as tf

from tf_gradcomp import tf_private
from tf_gradcomp.groups.strategy_group import StrategyGroup

_FIRST_GROUP_KEY = 4_000_000  # far from those of other groups: see `tf_private`
_group_keys = itertools.count(_FIRST_GROUP_KEY)


class Pairs:
    """Exchanges vectors between two workers of a strategy, by a collective of the two.

    TensorFlow has no point-to-point messages for a strategy's workers, but a collective can have a
    group of two. A worker can be in several pairs at a time.

    Args:
        group: The workers. All of them create their objects of this class in the same order.
    """

    def __init__(self, group: StrategyGroup) -> None:
        (own,) = group.communicators()
        self.rank, self.size = int(own.rank), group.size
        device = tf.DeviceSpec.from_string(group.devices[0])
        # Vectors are short. Besides, NCCL wants all of a GPU's collectives in one order.
        self._host = device.replace(device_type="CPU", device_index=0).to_string()
        self._seconds = tf_private.timeout_seconds(group.strategy)
        self._group_key = next(_group_keys)
        for _ in range(self.size**2 - 1):  # each pair has a key of its own
            next(_group_keys)

    def swap(self, values: tf.Tensor, partner: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """Returns the partner's vector; the own one if the worker is its own partner.

        Args:
            values: float32 vector, as long as the partner's.
            partner: int32 scalar, the partner's rank. The partner calls this with our rank.
            number: int32 scalar that is the same for both, and another one in each call.
        """
        with tf.device(self._host):
            if tf.get_static_value(partner) not in (None, self.rank):
                return self._gather(values, partner, number)
            alone = lambda: tf.identity(values)  # noqa: E731
            together = lambda: self._gather(values, partner, number)  # noqa: E731
            return tf.cond(tf.equal(partner, self.rank), alone, together)

    def _gather(self, values: tf.Tensor, partner: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        low, high = tf.minimum(partner, self.rank), tf.maximum(partner, self.rank)
        rows = tf.raw_ops.CollectiveGatherV2(
            # TensorFlow sorts the two by the names of their devices: a row tells whose it is.
            input=tf.concat([[tf.cast(self.rank, tf.float32)], values], 0)[tf.newaxis],
            group_size=2,
            group_key=self._group_key + low * self.size + high,
            instance_key=number,
            ordering_token=[],
            timeout_seconds=self._seconds,
        )
        place = tf.cast(tf.equal(rows[0, 0], tf.cast(self.rank, tf.float32)), tf.int32)
        return tf.ensure_shape(rows[place, 1:], values.shape)
