"""A GPU, used only through CUDA's driver and NVRTC, and the kernels' structures."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

SOURCES = Path(__file__).parents[1] / "custom_ops" / "gpu"
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # of CUdevice_attribute
NUMBERS = {
    "int": c_int,
    "unsigned": ctypes.c_uint,
    "long long": ctypes.c_longlong,
    "unsigned long long": ctypes.c_ulonglong,
    "float": c_float,
    "double": ctypes.c_double,
}
DECLARED = re.compile(
    r"constexpr int (?P<constant>\w+) = (?P<value>[^;]*);"
    r"|struct (?P<struct>\w+)( : (?P<base>\w+)\S*)? \{(?P<fields>.*?)\n\};",
    re.DOTALL,
)


def read_tables() -> tuple[dict[str, int], dict[str, Any]]:
    """Parses the constants and structures of `*tables.h`; pointers become addresses."""
    first = ["tables.h", "fixed_tables.h"]  # the basis of the other files
    others = {path.name for path in SOURCES.glob("*tables.h")} - set(first)
    constants: dict[str, int] = {}
    structures: dict[str, Any] = {}
    for name in [*first, *sorted(others)]:
        text = re.sub("//.*", "", (SOURCES / name).read_text())
        for found in DECLARED.finditer(text):
            if found["constant"]:
                constants[found["constant"]] = int(eval(found["value"], {}, constants))
            else:
                base = structures.get(found["base"], ctypes.Structure)
                structures[found["struct"]] = structure(
                    found["struct"], base, found["fields"], {**NUMBERS, **structures}
                )
    return constants, structures


def structure(name: str, base: Any, text: str, types: Mapping[str, Any]) -> Any:
    """Returns a structure, from the text of its fields."""
    fields = []
    for declaration in filter(None, map(str.strip, text.split(";"))):
        kind, _, field = declaration.rpartition(" ")
        fields.append((field, c_void_p if "*" in kind else types[kind]))
    return type(name, (base,), {"_fields_": fields})


CONSTANTS, STRUCTURES = read_tables()


def open_first(names: Sequence[str | Path]) -> ctypes.CDLL:
    """Loads the first library that exists."""
    for name in names:
        try:
            return ctypes.CDLL(str(name))
        except OSError as error:
            last = error
    raise SystemExit(f"None of {', '.join(map(str, names))} can be loaded: {last}")


def nvrtc() -> ctypes.CDLL:
    """CUDA's compiler, of pip's package or the system's."""
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    packaged = [path for folder in folders for path in Path(folder, "lib").glob("libnvrtc.so.*")]
    return open_first([*packaged, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"])


def compiled(capability: int) -> Any:
    """The kernels as code of the device."""
    library = nvrtc()
    included = [path.name for path in (*SOURCES.glob("*.cu"), *SOURCES.glob("*.h"))]
    included.append("../kernels/philox.h")
    texts = [(SOURCES / name).read_bytes() for name in included]
    program, size = c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(
        byref(program),
        (SOURCES / "kernels.cu").read_bytes(),
        b"kernels.cu",
        len(included),
        (c_char_p * len(included))(*texts),
        (c_char_p * len(included))(*map(str.encode, included)),
    )
    options = [f"--gpu-architecture=sm_{capability}".encode(), b"--std=c++17", b"--fmad=false"]
    options += [b"--device-int128", b"--generate-line-info"]
    error = library.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
    if error:
        library.nvrtcGetProgramLogSize(program, byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise SystemExit(f"NVRTC fails for sm_{capability}: {log.value.decode()}")
    library.nvrtcGetCUBINSize(program, byref(size))
    code = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, code)
    return code


class Gpu:
    """The first device, by CUDA's driver alone."""

    def __init__(self, driver: str = "libcuda.so.1") -> None:
        self._memory: list[ctypes.c_ulonglong] = []
        self._driver = open_first([driver])
        self._call("cuInit", 0)
        device, context, self._module = c_int(), c_void_p(), c_void_p()
        self._call("cuDeviceGet", byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, len(name), device)
        self.name = name.value.decode()
        version = c_int(), c_int()
        for component, attribute in zip(version, (CAPABILITY_MAJOR, CAPABILITY_MINOR), strict=True):
            self._call("cuDeviceGetAttribute", byref(component), attribute, device)
        self.capability = 10 * version[0].value + version[1].value
        self._call("cuModuleLoadData", byref(self._module), compiled(self.capability))

    def _call(self, name: str, *args: Any) -> None:
        error = getattr(self._driver, name)(*args)
        if error:
            raise SystemExit(f"{name} fails with error {error} of CUDA's driver.")

    def room(self, size: int) -> int:
        """Allocates a number of bytes, until `free`."""
        memory = ctypes.c_ulonglong()
        self._call("cuMemAlloc_v2", byref(memory), ctypes.c_size_t(max(int(size), 1)))
        self._memory.append(memory)
        return memory.value

    def free(self) -> None:
        """Frees all memory."""
        self.wait()
        for memory in self._memory:
            self._call("cuMemFree_v2", memory)
        self._memory.clear()

    def zeros(self, size: int) -> int:
        """Allocates a number of bytes with zeros."""
        return self.put(np.zeros(int(size), np.uint8))

    def put(self, values: np.ndarray | ctypes.Structure | ctypes.Array) -> int:
        """A copy of an array or a structure."""
        data = values.tobytes() if isinstance(values, np.ndarray) else bytes(values)
        memory = self.room(len(data))
        to, size = ctypes.c_ulonglong(memory), ctypes.c_size_t(len(data))
        self._call("cuMemcpyHtoDAsync_v2", to, data, size, None)
        self.wait()
        return memory

    def get(self, memory: int, size: int) -> bytes:
        """Downloads a number of bytes."""
        data = ctypes.create_string_buffer(int(size))
        address, length = ctypes.c_ulonglong(memory), ctypes.c_size_t(int(size))
        self._call("cuMemcpyDtoHAsync_v2", data, address, length, None)
        self.wait()
        return data.raw

    def wait(self) -> None:
        """Waits until all launches have ended."""
        self._call("cuStreamSynchronize", None)

    def copy(self, source: int, target: int, size: int) -> None:
        """Copies within the device."""
        addresses = ctypes.c_ulonglong(target), ctypes.c_ulonglong(source)
        self._call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(size), None)

    def launch(
        self,
        name: str,
        blocks: int,
        step: ctypes.Structure,
        threads: int = CONSTANTS["kThreads"],
    ) -> None:
        """Launches a kernel with its only parameter."""
        function = c_void_p()
        self._call("cuModuleGetFunction", byref(function), self._module, name.encode())
        parameters = (c_void_p * 1)(ctypes.addressof(step))
        grid = (blocks, 1, 1, threads, 1, 1, 0)
        self._call("cuLaunchKernel", function, *grid, None, parameters, None)

    def seconds(self, work: Callable[[], None], in_front: Callable[[], None]) -> float:
        """Returns the device's seconds for `work`, launched while the device runs `in_front`."""
        events = c_void_p(), c_void_p()
        for event in events:
            self._call("cuEventCreate", byref(event), 0)
        in_front()
        self._call("cuEventRecord", events[0], None)
        work()
        self._call("cuEventRecord", events[1], None)
        self.wait()
        milliseconds = c_float()
        self._call("cuEventElapsedTime", byref(milliseconds), *events)
        for event in events:
            self._call("cuEventDestroy_v2", event)
        return milliseconds.value / 1000
