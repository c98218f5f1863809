"""The means over the replicas of what a step returns: metrics, which training does not wait for."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_gradcomp.distribute import tf_private


def means_over_replicas(strategy: tf.distribute.Strategy, values: Any) -> Any:
    """The mean of each value of a nested structure over all replicas, in its own shape.

    One collective for all of them, in a group of its own: it starts as soon as they are known,
    mostly while gradients are still computed, and gradients don't wait for it.

    Args:
        strategy: With the same number of replicas on each worker.
        values: Numbers of any dtype, and tensors of equal shapes on all replicas, as
            `Strategy.run` returns them.

    Returns:
        The same structure, equal on all workers; in the dtypes of the floats, and float64 for all
        other dtypes, as `Strategy.reduce` returns them.
    """
    leaves = tf.nest.flatten(values)
    if not leaves:
        return values
    # What is on a GPU is small, and goes to the host anyway.
    with tf.device("CPU:0"):
        parts = [
            [tf.convert_to_tensor(part) for part in strategy.experimental_local_results(leaf)]
            for leaf in leaves
        ]
        own = [tf.add_n([tf.cast(p, tf.float64) for p in some]) / len(some) for some in parts]
        flat = [tf.reshape(mean, [-1]) for mean in own]
        packed = tf.concat(flat, 0)
        if tf_private.in_multi_worker_mode(strategy):
            packed = tf_private.mean_over_workers(strategy, packed)
        split = tf.split(packed, [tf.size(mean) for mean in flat])
        dtypes = [some[0].dtype for some in parts]
        means = [
            tf.cast(tf.reshape(mean, tf.shape(like)), dtype if dtype.is_floating else tf.float64)
            for mean, like, dtype in zip(split, own, dtypes, strict=True)
        ]
    return tf.nest.pack_sequence_as(values, means)
