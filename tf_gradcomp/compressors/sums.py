"""Sums for methods: whole gradients, vectors that may be empty, and sums that are too large."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.base import Exchanged, ExchangeInputs
from tf_gradcomp.compressors.requests import AllReduce, Request


def sum_as(dtype: tf.DType, inputs: ExchangeInputs) -> Generator[AllReduce, tf.Tensor, Exchanged]:
    """Casts all gradients to `dtype` and sums them, as one vector.

    A gradient that is not finite makes the sum not finite on all replicas, so no flag is needed.
    """
    sizes = [spec.elements for spec in inputs.specs]
    flat = [tf.reshape(tf.cast(gradient, dtype), [-1]) for gradient in inputs.gradients]
    total = tf.concat(flat, 0)
    if sum(sizes) > 0:
        total = yield AllReduce(total)
    finite = tf.logical_and(inputs.finite, tf.reduce_all(tf.math.is_finite(total)))
    total = tf.cond(finite, lambda: total, lambda: tf.zeros_like(total))
    reduced = [
        tf.reshape(tf.cast(part, tf.float32), spec.shape)
        for part, spec in zip(tf.split(total, sizes), inputs.specs, strict=True)
    ]
    tensor_bytes = tf.constant(np.array(sizes, np.int64) * dtype.size)
    return Exchanged(reduced, finite, tensor_bytes)


def zero_if_too_large(total: tf.Tensor, given_finite: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Replaces a sum by zeros if the sum is not finite although all its terms are finite.

    The step is then skipped, and the method discards the terms: in the residuals, they would make
    the sums of all later steps too large as well. Returns the sum or zeros, and whether the sum
    fits.
    """
    finite = tf.reduce_all(tf.math.is_finite(total))
    too_large = tf.logical_and(given_finite, tf.logical_not(finite))
    kept = tf.cond(too_large, lambda: tf.zeros_like(total), lambda: tf.identity(total))
    return kept, tf.logical_not(too_large)


OneRequest = TypeVar("OneRequest", bound=Request)


def request_unless_empty(
    vector: tf.Tensor, request: Callable[[tf.Tensor], OneRequest]
) -> Generator[OneRequest, tf.Tensor, tf.Tensor]:
    """Requests the communication of a vector, unless the vector is empty.

    If the graph does not determine the vector's length, because settings change between steps, a
    zero is sent in place of an empty vector.
    """
    length = vector.shape.num_elements()
    if length == 0:
        return vector
    if length is not None:
        return (yield request(vector))
    size = tf.size(vector)
    answer = yield request(tf.pad(vector, [[0, tf.cast(tf.equal(size, 0), tf.int32)]]))
    return answer[:size]
