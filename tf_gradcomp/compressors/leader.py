"""The leader of a step: the replica that chooses the entries that all replicas send."""

from __future__ import annotations

import tensorflow as tf

from tf_gradcomp.compressors.digests import MIXING


def leader(step: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the leader of a step: each replica leads once in a run of `size` steps.

    The replicas lead in cyclic order. Each run begins with a pseudo-random replica, except that the
    first run begins with the first replica. So among steps that are a fixed number apart, all
    replicas soon lead. An optimizer that trains several sets of variables in turn trains each set
    in such steps. `tests.reference.leader` computes the same for Python's integers.
    """
    mixed = step // size * MIXING
    mixed = (mixed ^ tf.bitwise.right_shift(mixed, 32)) * MIXING
    begin = tf.bitwise.right_shift(mixed, 33)
    return tf.cast((begin + step % size) % size, tf.int32)
