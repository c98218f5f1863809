"""Copies of data that a program's Python code hands to TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

_ALIGNMENT = 64  # TensorFlow takes over memory that is as aligned as this
# The one op that copies tensors of every type does it for a debugger, which is not there.
_DEBUGGER = ["DebugIdentity;file://;0"]


def in_own_memory(value: Any) -> Any:
    """Returns a copy of an array or tensor, in memory that the program does not have.

    TensorFlow takes over aligned memory of NumPy without a copy, and never writes into it. But it
    forgets this for a slice, and a worker's part of a batch is one: a layer that runs in place
    overwrites the program's data.

    Each array is copied: nothing tells for certain that no one else has it, and a generator holds
    its last batch. An ordinary array is not aligned, and TensorFlow would copy it; it does not copy
    this copy, so there is still one.
    """
    if isinstance(value, tf.Tensor):
        return _copied_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OSU":  # TensorFlow copies strings
        return _copied_array(value)
    return value


def _copied_array(array: np.ndarray) -> np.ndarray:
    room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    copy = np.ndarray(array.shape, array.dtype, buffer=room, offset=start)
    np.copyto(copy, array)
    return copy


def _copied_tensor(tensor: tf.Tensor) -> tf.Tensor:
    """Copies a tensor on the CPU, which may be in memory of PyTorch, for example."""
    if "CPU" not in tensor.backing_device:
        return tensor
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.raw_ops.CopyHost(input=tensor, debug_ops_spec=_DEBUGGER)
