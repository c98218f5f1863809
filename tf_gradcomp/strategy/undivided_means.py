"""Finds losses that are means over a worker's rows, which the program must divide by replicas."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.groups.notices import tell_user

_SUMS = ("AddV2", "Add", "AddN", "Sub", "Neg", "Pack", "ConcatV2")
_SAME = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "CheckNumerics", "EnsureShape")
_PRODUCTS = ("Mul", "RealDiv", "DivNoNan")
_OF_SHAPE = ("Cast", "StridedSlice", "Prod", "GatherV2", "Identity")
# In each graph, whether the gradient with this id is of such a loss.
_gradients: weakref.WeakKeyDictionary[tf.Graph, dict[int, bool]] = weakref.WeakKeyDictionary()
_divided: weakref.WeakKeyDictionary[tf.Graph, set[int]] = weakref.WeakKeyDictionary()


def on_tape_gradient() -> None:
    """Records, when a step is traced, which gradients are of a mean that nothing divides."""
    original = tf.GradientTape.gradient

    @functools.wraps(original)
    def hooked(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = original(self, target, sources, *args, **kwargs)
        if any(getattr(source, "trainable", False) for source in tf.nest.flatten(sources)):
            _record(target, gradients)
        return gradients

    tf.GradientTape.gradient = hooked


def note_divided(loss: tf.Tensor) -> None:
    """Records a loss that Keras has divided by the number of replicas."""
    if tf.is_symbolic_tensor(loss):
        _divided.setdefault(loss.graph, set()).add(id(loss))


def tell_of_undivided_mean(gradients: Sequence[Any]) -> None:
    """Tells the user if `gradients`, which will be summed, are of a mean that nothing divides."""
    known = _gradients.get(tf.compat.v1.get_default_graph(), {})
    # Otherwise, the program has computed them from gradients of this step, such as by clipping.
    direct = [known[id(_values(one))] for one in gradients if id(_values(one)) in known]
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1 and any(direct or known.values()):
        tell_user(
            "A step trains on the mean of a loss over the rows of its own worker. Gradients are "
            f"summed over {replicas} replicas, so they are {replicas} times as large as in one "
            "process. Divide such a loss by strategy.num_replicas_in_sync; or take means, by "
            'gc.CompressedOptimizer(..., reduction="mean").'
        )


def forget_gradients() -> None:
    """Forgets the gradients that were recorded in the step that is traced."""
    _gradients.pop(tf.compat.v1.get_default_graph(), None)


def _record(target: Any, gradients: Any) -> None:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas == 1 or tf.executing_eagerly():
        return
    losses = [one for one in tf.nest.flatten(target) if tf.is_symbolic_tensor(one)]
    found = any(_is_undivided_mean(loss, replicas) for loss in losses if loss.shape.rank == 0)
    known = _gradients.setdefault(tf.compat.v1.get_default_graph(), {})
    known.update({id(_values(one)): found for one in tf.nest.flatten(gradients) if one is not None})


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _is_undivided_mean(loss: tf.Tensor, replicas: int) -> bool:
    """Returns whether a mean is a term of a loss, and the loss divides nothing by `replicas`.

    A sum is no mean, even if a number divides it: that may be the rows of all workers.
    """
    waiting, known, found = [loss], set(), False
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in known or id(tensor) in _divided.get(tensor.graph, ()):
            continue
        known.add(id(tensor))
        op, inputs = tensor.op, list(tensor.op.inputs)
        if op.type in _SUMS or op.type in _SAME:
            waiting += inputs[:1] if op.type in _SAME else inputs
        elif op.type in ("Mean", "Sum") and inputs[0].op.type in ("Pack", "ConcatV2"):
            waiting.append(inputs[0])  # of several losses
        elif op.type == "Mean":
            found = True
        elif op.type in _PRODUCTS:
            numbers = [tf.get_static_value(one) for one in inputs]
            if _divides(op.type, numbers, replicas):
                return False
            is_quotient = op.type != "Mul"
            found = found or (is_quotient and _is_size(inputs[1]))
            factors = inputs[:1] if is_quotient else inputs
            waiting += [one for one, n in zip(factors, numbers, strict=False) if n is None]
    return found


def _divides(op: str, numbers: Sequence[Any], replicas: int) -> bool:
    """Returns whether an op multiplies or divides by the right number."""
    right = 1 / replicas if op == "Mul" else replicas
    candidates = numbers if op == "Mul" else numbers[1:]
    return any(n is not None and np.size(n) == 1 and np.isclose(n, right) for n in candidates)


def _is_size(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is the number of elements or rows of another tensor."""
    while tensor.op.type in _OF_SHAPE:
        tensor = tensor.op.inputs[0]
    return tensor.op.type in ("Shape", "Size")
