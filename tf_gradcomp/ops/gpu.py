"""The GPU kernels: the device, and whether they are used on it.

The first use compiles the kernels for the device and checks them against the CPU kernels.
`GRADCOMP_GPU=0` in the environment switches them off.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import tensorflow as tf

from tf_gradcomp.ops import library


@dataclasses.dataclass(frozen=True)
class GpuInfo:
    """A description of a CUDA device."""

    name: str  # empty without a driver
    capability: int  # 90: compute capability 9.0; 0 without a driver
    error: str  # why the kernels are not used; empty if they are used


@functools.cache
def info(ordinal: int) -> GpuInfo:
    """Describes a device; the first call compiles and checks the kernels, in a few seconds.

    Args:
        ordinal: CUDA's number of the device, among those that are visible.

    Returns:
        Its description, even if the device does not exist.
    """
    native = _native()
    return GpuInfo(
        native.tf_gradcomp_gpu_name(ordinal).decode(),
        native.tf_gradcomp_gpu_capability(ordinal),
        native.tf_gradcomp_gpu_error(ordinal).decode(),
    )


def problem(device: str) -> str:
    """Returns why a TensorFlow device does not use the kernels; empty if it does.

    Args:
        device: Its name.
    """
    spec = tf.DeviceSpec.from_string(device)
    visible = tf.config.get_visible_devices("GPU")
    if spec.device_type != "GPU" or not visible:
        return "it is no GPU"
    index = min(spec.device_index or 0, len(visible) - 1)  # one may be split into several
    return info(int(visible[index].name.rpartition(":")[2])).error


def compile_for(capability: int) -> str:
    """Compiles the kernels, even without a GPU.

    Args:
        capability: The compute capability, 90 for 9.0.

    Returns:
        The error; empty on success.
    """
    return _native().tf_gradcomp_gpu_compile(capability).decode()


@functools.cache
def _native() -> ctypes.CDLL:
    library.load()
    native = ctypes.CDLL(str(library.PATH))
    for name in ("name", "error", "compile"):
        getattr(native, f"tf_gradcomp_gpu_{name}").restype = ctypes.c_char_p
    return native
