"""Communicates vectors that may be empty with some settings, which collectives refuse."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import tensorflow as tf

from tf_gradcomp.compressors.requests import Request

OneRequest = TypeVar("OneRequest", bound=Request)


def unless_empty(
    vector: tf.Tensor, request: Callable[[tf.Tensor], OneRequest]
) -> Generator[OneRequest, tf.Tensor, tf.Tensor]:
    """Asks for a vector to be communicated.

    If the vector is known to be empty when the graph is built, nothing is asked for. If its length
    may change between steps, with the settings, a zero is sent in steps in which it is empty.
    """
    length = vector.shape.num_elements()
    if length == 0:
        return vector
    if length is not None:
        return (yield request(vector))
    size = tf.size(vector)
    answer = yield request(tf.pad(vector, [[0, tf.cast(tf.equal(size, 0), tf.int32)]]))
    return answer[:size]
