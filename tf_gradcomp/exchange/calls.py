"""Calls of Python by a step's graph: what few steps need would make every graph larger."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.groups.group import Group


def call_in_python(
    group: Group, function: Callable[..., Any], arguments: Sequence[Any], results: Any
) -> Any:
    """Calls a function of tensors; if it can, a graph does so by one node, which traces faster.

    TensorFlow does not know which variables Python reads and writes. So the call must wait for the
    graph's earlier writes, and later reads and writes for the results.

    Args:
        group: The replicas.
        function: Called with tensors and slices.
        arguments: Its arguments.
        results: Tensors, slices or specs, in the structure, dtypes and shapes of its results.
    """
    if tf.executing_eagerly() or not _can_call_python(group):
        return function(*arguments)
    strategy = tf.distribute.get_strategy()
    across_replicas = tf.distribute.in_cross_replica_context()

    def eagerly(*arrays: np.ndarray) -> list[np.ndarray]:
        tensors = list(map(tf.constant, arrays))
        with strategy.scope() if across_replicas else contextlib.nullcontext():
            nest = function(*tf.nest.pack_sequence_as(arguments, tensors, expand_composites=True))
        return [tensor.numpy() for tensor in tf.nest.flatten(nest, expand_composites=True)]

    specs = tf.nest.flatten(results, expand_composites=True)
    flat = tf.nest.flatten(arguments, expand_composites=True)
    values = tf.numpy_function(eagerly, flat, [spec.dtype for spec in specs])
    shaped = [tf.ensure_shape(v, spec.shape) for v, spec in zip(values, specs, strict=True)]
    return tf.nest.pack_sequence_as(results, shaped, expand_composites=True)


def _can_call_python(group: Group) -> bool:
    """Whether the graph of a step may call Python, outside of code that XLA compiles.

    Eager ops that cross devices wait for threads, which other replicas' steps may hold.
    """
    return group.all_replicas.local_size == 1 and not tf.config.list_logical_devices("GPU")
