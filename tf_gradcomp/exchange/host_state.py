"""Places state where the ops can update it: on the host, or on the GPU where they run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.ops import gpu
from tf_gradcomp.private import tensorflow as tf_private


class OnHost:
    """Places state where the ops can update it.

    A variable on an accelerator is copied to the host for the exchange, and back. A variable in
    `on_gpu` stays on a GPU whose kernels are used.
    """

    def __init__(
        self, state: Mapping[str, Sequence[tf.Variable]], on_gpu: Collection[str] = ()
    ) -> None:
        self._state = state
        self._on_gpu = on_gpu
        self._copies: list[tuple[tf.Variable, tf.Tensor]] = []

    def __enter__(self) -> dict[str, list[tf.Tensor]]:
        return {
            name: [self._handle(variable, name in self._on_gpu) for variable in of_all]
            for name, of_all in self._state.items()
        }

    def __exit__(self, *_: Any) -> None:
        for variable, handle in self._copies:
            variable.assign(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32))

    def _handle(self, variable: tf.Variable, has_kernels: bool) -> tf.Tensor:
        if _on_host(variable) or (has_kernels and not gpu.problem(variable.device)):
            return variable.handle
        handle = _host_copy(variable)
        self._copies.append((variable, handle))
        return handle


def _on_host(variable: tf.Variable) -> bool:
    return tf.DeviceSpec.from_string(variable.device).device_type in (None, "CPU")


def _host_copy(variable: tf.Variable) -> tf.Tensor:
    """A copy that is freed with its last handle, at the end of the step."""
    with tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=variable.shape, shared_name=tf_private.anonymous_name()
        )
        tf.raw_ops.AssignVariableOp(resource=handle, value=variable.read_value())
    return handle
