"""Which replica leads a step, of the methods in which one chooses the entries that all send."""

from __future__ import annotations

import tensorflow as tf

from tf_gradcomp.compressors.digests import MIXING


def leader(step: tf.Tensor, size: int) -> tf.Tensor:
    """Each replica leads once in a run of `size` steps, in cyclic order.

    Where that order begins is pseudo-random for each run, beginning with the first replica in the
    first run. So all replicas soon lead among any steps that are a fixed number apart: where an
    optimizer trains several sets of variables in turn, those are the steps of one set.
    `tests.reference.leader` is the same for whole numbers of Python.

    Args:
        step: int64 scalar, not negative.
        size: The number of replicas.

    Returns:
        int32 scalar, the rank of the leader.
    """
    mixed = step // size * MIXING
    mixed = (mixed ^ tf.bitwise.right_shift(mixed, 32)) * MIXING
    begin = tf.bitwise.right_shift(mixed, 33)
    return tf.cast((begin + step % size) % size, tf.int32)
