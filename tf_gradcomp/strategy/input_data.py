"""Data under a strategy: workers begin steps at once, and never write into a program's data."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.private import tensorflow as tf_private
from tf_gradcomp.private.patching import patch
from tf_gradcomp.strategy.strategy import MultiWorkerMirroredStrategy, has_strategy

_ALIGNMENT = 64  # TensorFlow takes over memory with this alignment
# The only op that copies tensors of every type is meant for a debugger, which is absent here.
_DEBUGGER = ["DebugIdentity;file://;0"]


@patch(
    tf_private.COUNT_REPLICAS_WITH_DATA,
    why="Each step waits for a collective that checks whether any worker has data.",
    test="test_begin_steps_with_local_data",
)
def begin_steps_with_local_data(
    original: Any, strategy: tf.distribute.Strategy, input_workers: Any, optional_list: Any
) -> tf.Tensor:
    """Has a worker that has data begin its step at once.

    Before each step, iterators sum over all workers how many replicas have data. The sum only has
    to be known on a worker that has none.
    """
    total = original(strategy, input_workers, optional_list)
    checked = isinstance(strategy, MultiWorkerMirroredStrategy) and tf_private.in_multi_worker_mode(
        strategy
    )
    if not checked or tf_private.in_loop_or_eager():
        return total
    with tf.device(input_workers.worker_devices[0]):
        has_values = [tf.cast(optional.has_value(), tf.int64) for optional in optional_list[0]]
        local = tf.add_n(has_values)
    return tf.cond(local > 0, lambda: local, lambda: total)


@patch(
    tf_private.CALL_PYTHON,
    why="TensorFlow shares aligned NumPy memory, and layers that run in place overwrite it.",
    test="test_copy_what_python_returns",
)
def copy_what_python_returns(original: Any, self: Any, token: Any, device: Any, args: Any) -> Any:
    """Copies each array or tensor that Python code returns to TensorFlow, under our strategy.

    `tf.numpy_function`, `tf.py_function`, `Dataset.from_generator` and Keras' data adapters call
    such code, all through one registry.
    """
    returned = original(self, token, device, args)
    if not has_strategy():
        return returned
    return list(map(copied, returned)) if isinstance(returned, list) else copied(returned)


def copied(value: Any) -> Any:
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
