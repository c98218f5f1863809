"""Copies of data that a program's Python code hands to TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

_ALIGNMENT = 64  # TensorFlow takes over memory with this alignment
# The only op that copies tensors of every type is meant for a debugger, which is absent here.
_DEBUGGER = ["DebugIdentity;file://;0"]


def in_own_memory(value: Any) -> Any:
    """Returns a copy of an array or tensor, in memory that the program cannot access.

    TensorFlow takes over aligned memory of NumPy without a copy, and never writes into it.
    TensorFlow does write into slices, however, and a worker's part of a batch is a slice. A layer
    that runs in place would thus overwrite the program's data.

    Each array is copied, because no test proves that nobody else uses it; a generator, for example,
    holds its last batch. TensorFlow would copy an ordinary array, which is not aligned, but does
    not copy this aligned copy, so there is still only one copy.
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
    """Copies a tensor on the CPU, which may be in PyTorch's memory, for example."""
    if "CPU" not in tensor.backing_device:
        return tensor
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.raw_ops.CopyHost(input=tensor, debug_ops_spec=_DEBUGGER)
