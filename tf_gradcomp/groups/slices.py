"""Sums of `tf.IndexedSlices`, the gradients of lookups in a table, over replicas."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

_NOT_VALUES = ("Shape", "ShapeN", "Size", "Rank", "ReadVariableOp", "VariableShape")
_independent: contextvars.ContextVar[frozenset[int]]
_independent = contextvars.ContextVar("independent", default=frozenset())
_DATA = ("IteratorGetNext", "OptionalGetValue", "PyFunc", "EagerPyFunc")


def sum_of_slices(parts: Sequence[tf.IndexedSlices], local: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the sum of the slices of several replicas; `local` are those of one of them."""
    concatenated = tf.IndexedSlices(
        tf.concat([part.values for part in parts], 0),
        tf.concat([part.indices for part in parts], 0),
        parts[0].dense_shape,
    )
    return sum_of_concatenated(concatenated, len(parts), local)


def sum_of_concatenated(
    slices: tf.IndexedSlices, replicas: int, local: tf.IndexedSlices
) -> tf.IndexedSlices:
    """Adds up the concatenated slices of replicas if a lookup does not depend on the batch.

    Positions are such a lookup: all replicas have the same rows, and one process has each of its
    slices once. Keras squares slices one by one. The slices of words therefore stay as they are:
    in one process, too, each word of the batch has its own.
    """
    if not is_independent(local):
        return slices
    size = tf.size(slices.indices)
    count = size // replicas
    rows = tf.reshape(slices.indices[: replicas * count], [replicas, count])
    alike = tf.logical_and(tf.equal(replicas * count, size), tf.reduce_all(rows == rows[:1]))
    parts, length = tf.where(alike, replicas, 1), tf.where(alike, count, size)
    shape = tf.concat([[parts, length], tf.shape(slices.values)[1:]], 0)
    values = tf.reduce_sum(tf.reshape(slices.values, shape), 0)
    values = tf.ensure_shape(values, [None, *slices.values.shape[1:]])
    return tf.IndexedSlices(values, slices.indices[:length], slices.dense_shape)


@contextlib.contextmanager
def assuming_independent(gradients: Iterable[Any]) -> Iterator[None]:
    """Within this context, the lookups with these gradients are known not to depend on a batch."""
    slices = [gradient for gradient in gradients if isinstance(gradient, tf.IndexedSlices)]
    token = _independent.set(frozenset(id(gradient.indices) for gradient in slices))
    try:
        yield
    finally:
        _independent.reset(token)


def is_independent(gradient: Any) -> bool:
    """Whether a gradient is of a lookup that does not depend on the batch.

    A traced step computes the rows of such a lookup from none of its arguments. An eager step does
    not show where its tensors come from.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return False
    if id(gradient.indices) in _independent.get():
        return True
    if not tf.is_symbolic_tensor(gradient.indices):
        return False
    waiting, known = [gradient.indices], set()
    while waiting:
        tensor = waiting.pop()
        if not tf.is_symbolic_tensor(tensor) or tensor.op in known or tensor.op.type in _NOT_VALUES:
            continue
        known.add(tensor.op)
        if tensor.op.type.startswith(_DATA):
            return False
        waiting += tensor.op.inputs
        if tensor.op.type == "Placeholder":
            captures = getattr(tensor.graph, "captures", ())
            outer = [value for value, placeholder in captures if placeholder is tensor]
            if not outer:
                return False
            waiting += outer
    return True
