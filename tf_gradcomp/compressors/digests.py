"""Numbers that are equal on all replicas without communication: digests, and a step's leader."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

MIXING = np.int64(-7046029254386353131)  # 0x9e3779b97f4a7c15, as in the checksum of payloads


def digest(numbers: tf.Tensor) -> tf.Tensor:
    """Returns an int64 scalar that changes if any int64 changes or two are swapped."""
    places = tf.range(1, tf.size(numbers) + 1, dtype=tf.int64)
    mixed = (numbers + places * MIXING) * MIXING
    mixed ^= tf.bitwise.right_shift(mixed, 31)
    return tf.reduce_sum(mixed * MIXING)


def digest_of_floats(values: tf.Tensor) -> tf.Tensor:
    """Returns the `digest` of the bits of float32 numbers."""
    return digest(tf.cast(tf.bitcast(tf.reshape(values, [-1]), tf.int32), tf.int64))


def leader(step: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the leader of a step: each replica leads once in a run of `size` steps.

    The replicas lead in cyclic order. Each run begins with a pseudo-random replica, except that the
    first run begins with the first replica. Steps that are a fixed number apart therefore soon have
    every replica as leader. An optimizer that alternates between several sets of variables trains
    each set in such steps. `tests.reference.leader` computes the same for Python's integers.
    """
    mixed = step // size * MIXING
    mixed = (mixed ^ tf.bitwise.right_shift(mixed, 32)) * MIXING
    begin = tf.bitwise.right_shift(mixed, 33)
    return tf.cast((begin + step % size) % size, tf.int32)
