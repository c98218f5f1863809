"""Loads the op library, and knows which GPUs its kernels run on.

The GPU kernels: the device, and whether they are used on it.

The first use compiles the kernels for the device and checks them against the CPU kernels.
`GRADCOMP_GPU=0` in the environment switches them off.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import os
import platform
import re
from pathlib import Path
from types import ModuleType

import tensorflow as tf

FOLDER = Path(__file__).parent
REBUILD = "pip install --force-reinstall --no-deps ."
REBUILD_EDITABLE = "pip install --no-deps -e ."

_NAME = "_tf_gradcomp_ops_{}_{}.so"  # setup.py gives it the minor version of TensorFlow
_BUILD_INFO = re.compile(rb"tf_gradcomp built for TensorFlow ([^\0]+)\0")
_NVRTC_PACKAGE = "nvidia.cuda_nvrtc"  # of tensorflow[and-cuda]
SIMD_LIMITS = ("", "avx2", "portable")
_CPU_FEATURES = ("avx2", "f16c", "avx512f", "avx512bw", "avx512vl", "asimd")


def path_for(version: str) -> Path:
    """The library for a version of TensorFlow, whether it is there or not."""
    return FOLDER / _NAME.format(*version.split("."))


PATH = path_for(tf.__version__)


class LibraryError(ImportError):
    """The native ops can't be used with the TensorFlow that is installed."""


@dataclasses.dataclass(frozen=True)
class LibraryInfo:
    """A description of the library of native ops."""

    path: Path
    built_for: str | None  # version of TensorFlow; None without a library
    simd: str | None  # the variant of the kernels that runs here; None if it can't be loaded
    cpu_features: tuple[str, ...]  # features that the kernels use and this processor has
    error: str | None  # why it can't be loaded


@functools.cache
def load() -> ModuleType:
    """Loads the ops, once.

    Returns:
        The module that TensorFlow generates for them.

    Raises:
        LibraryError: If the library is not there, or is for another TensorFlow.
    """
    if not PATH.exists():
        raise LibraryError(_why_missing())
    _check_simd_limit(os.environ.get("GRADCOMP_SIMD", ""))
    try:
        ops = tf.load_op_library(str(PATH))
    except tf.errors.OpError as error:
        raise LibraryError(
            f"{PATH.name}, built for TensorFlow {built_for(PATH)}, can't be loaded into "
            f"TensorFlow {tf.__version__}: {error.message}. {_how_to_rebuild()}"
        ) from error
    _set_nvrtc_path()
    return ops


def library_info() -> LibraryInfo:
    """Describes the library without failing if it can't be loaded."""
    simd = error = None
    try:
        load()
        simd = _simd()
    except LibraryError as caught:
        error = str(caught)
    return LibraryInfo(PATH, built_for(PATH), simd, _cpu_features(), error)


def built_for(path: Path) -> str | None:
    """Reads the TensorFlow version from the file, without loading it as a library."""
    if not path.exists():
        return None
    match = _BUILD_INFO.search(path.read_bytes())
    return match.group(1).decode() if match else None


def _why_missing() -> str:
    libraries = PATH.parent.glob(_NAME.format("*", "*"))
    minors = sorted([int(part) for part in re.findall(r"\d+", path.name)] for path in libraries)
    built = [".".join(map(str, minor)) for minor in minors]
    if not built:
        return (
            f"The native ops of tf_gradcomp are not built: there is no {PATH}. If this is the "
            "source tree and tf_gradcomp is installed elsewhere, start your program in another "
            f"folder, because this folder hides the installed package. {_how_to_rebuild()}"
        )
    if len(built) == 1:
        how = _how_to_rebuild()
    else:
        how = f'Install one of these: pip install "tensorflow-cpu=={built[-1]}.*" (or tensorflow).'
    return (
        f"The native ops of tf_gradcomp were built for TensorFlow {', '.join(built)}, and "
        f"TensorFlow {tf.__version__} was found: ops work only with the minor version that they "
        f"were built for. {how}"
    )


def _check_simd_limit(named: str) -> None:
    if named not in SIMD_LIMITS:
        raise LibraryError(
            f"GRADCOMP_SIMD is {named!r} in the environment, but must be 'avx2' or 'portable', "
            "which limits the kernels' vector width. Without it, the kernels use the widest "
            "vectors available."
        )


def _how_to_rebuild() -> str:
    return (
        f"To rebuild, run in the source directory: {REBUILD} (or, for an editable install: "
        f"{REBUILD_EDITABLE}), or install the wheel of tf_gradcomp, which has the ops for every "
        "supported TensorFlow."
    )


def _simd() -> str:
    library = ctypes.CDLL(str(PATH))
    library.tf_gradcomp_simd.restype = ctypes.c_char_p
    return library.tf_gradcomp_simd().decode()


def _set_nvrtc_path() -> None:
    """Passes the path of pip's NVRTC to the library; the system finds any other NVRTC."""
    try:
        spec = importlib.util.find_spec(_NVRTC_PACKAGE)
    except ModuleNotFoundError:
        return
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in Path(folder, "lib").glob("libnvrtc.so.*")]
    if found:
        ctypes.CDLL(str(PATH)).tf_gradcomp_set_nvrtc(os.fsencode(min(found)))


def _cpu_features() -> tuple[str, ...]:
    try:
        listed = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return (platform.machine(),)
    return (platform.machine(), *(name for name in _CPU_FEATURES if name in listed))


@dataclasses.dataclass(frozen=True)
class GpuInfo:
    """A description of a CUDA device."""

    name: str  # empty without a driver
    capability: int  # 90: compute capability 9.0; 0 without a driver
    error: str  # why the kernels are not used; empty if they are used


@functools.cache
def gpu_info(ordinal: int) -> GpuInfo:
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
    return gpu_info(int(visible[index].name.rpartition(":")[2])).error


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
    load()
    native = ctypes.CDLL(str(PATH))
    for name in ("name", "error", "compile"):
        getattr(native, f"tf_gradcomp_gpu_{name}").restype = ctypes.c_char_p
    return native
