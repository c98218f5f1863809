"""The exchange of the methods that sum whole gradients in some float type."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.base import Exchanged, ExchangeInputs
from tf_gradcomp.compressors.requests import AllReduce


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
