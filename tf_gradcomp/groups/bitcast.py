"""Bitcasts dtypes that collectives do not support."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_COLLECTIVE_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_BY_CAST = (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16)


def encoded(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's bits in a dtype that collectives have; this may append an axis.

    `decoded` undoes this. Strings have no such bits; see `gathered`.
    """
    dtype = tensor.dtype
    if dtype in _COLLECTIVE_DTYPES:
        return tensor
    if dtype in _BY_CAST:
        return tf.cast(tensor, tf.int32)
    if dtype == tf.bfloat16:
        return tf.cast(tf.bitcast(tensor, tf.uint16), tf.int32)
    return tf.bitcast(tensor, tf.int32 if dtype.size == 4 else tf.int64)


def decoded(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the tensor of a dtype from which `encoded` made this tensor."""
    if dtype == tensor.dtype:
        return tensor
    if dtype in _BY_CAST:
        return tf.cast(tensor, dtype)
    if dtype == tf.bfloat16:
        return tf.bitcast(tf.cast(tensor, tf.uint16), dtype)
    return tf.bitcast(tensor, dtype)


def gathered(value: Any, dtype: tf.DType, gather: Callable[[Any], tf.Tensor]) -> tf.Tensor:
    """Gathers values of any dtype by `gather`, which takes dtypes that collectives have."""
    if dtype == tf.string:
        return _gathered_strings(value, gather)
    return decoded(gather(_on_each(encoded, value)), dtype)


def _gathered_strings(value: Any, gather: Callable[[Any], tf.Tensor]) -> tf.Tensor:
    lengths = gather(_on_each(tf.strings.length, value))
    longest = tf.reduce_max(tf.concat([tf.reshape(lengths, [-1]), [1]], 0))

    def padded(strings: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.io.decode_raw(strings, tf.uint8, fixed_length=longest), tf.int32)

    alphabet = tf.constant([bytes([i]) for i in range(256)])
    strings = tf.strings.reduce_join(tf.gather(alphabet, gather(_on_each(padded, value))), -1)
    return tf.strings.substr(strings, tf.zeros_like(lengths), lengths)


def as_bytes(strings: Any) -> bytes:
    """Returns an array of strings as bytes, which `as_strings` decodes."""
    return json.dumps([string.decode("latin-1") for string in np.ravel(strings)]).encode()


def as_strings(data: bytes, shape: tf.TensorShape) -> tf.Tensor:
    """Returns the strings that `as_bytes` encoded, in a shape."""
    strings = [string.encode("latin-1") for string in json.loads(data)]
    return tf.reshape(tf.constant(strings, tf.string), shape)


def _on_each(fn: Callable[[tf.Tensor], tf.Tensor], value: Any) -> Any:
    return tf.nest.map_structure(fn, value, expand_composites=True)
