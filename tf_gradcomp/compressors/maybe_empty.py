"""Communicates vectors that may be empty with some settings, which collectives refuse."""

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

    If the vector is known to be empty when the graph is built, nothing is asked for. If its length
    may change between steps, with the settings, a zero is sent in steps in which it is empty.

    Args:
        vector: The vector; its length is equal on all replicas.
        wish: Makes the wish from a vector; the answer must have the shape of that vector.

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
