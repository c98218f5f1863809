"""Communicating vectors that settings may leave empty: a collective needs an element."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import tensorflow as tf

from tf_gradcomp.compressors.wishes import Wish

OneWish = TypeVar("OneWish", bound=Wish)


def unless_empty(
    vector: tf.Tensor, wish: Callable[[tf.Tensor], OneWish]
) -> Generator[OneWish, tf.Tensor, tf.Tensor]:
    """Asks for a vector to be communicated.

    Nothing is asked for where it is known to be empty while the graph is built. Where its length is
    not known then, for settings may change, a zero is sent in a step in which it is empty.

    Args:
        vector: Its length is equal on all replicas.
        wish: What is asked for; the answer has the shape of what it is given.

    Returns:
        The answer, in the shape of `vector`.
    """
    length = vector.shape.num_elements()
    if length == 0:
        return vector
    if length is not None:
        return (yield wish(vector))
    size = tf.size(vector)
    answer = yield wish(tf.pad(vector, [[0, tf.cast(tf.equal(size, 0), tf.int32)]]))
    return answer[:size]
