"""Checks and times the kernels for GPUs alone: needs a GPU, NVRTC and NumPy, no TensorFlow.

The source is that which the op library compiles, `custom_ops/gpu/`. With --check, payloads,
residuals and sums of AdaComp are compared with the NumPy oracle, over types and bins of all kinds;
what differs is an error. For races:

    compute-sanitizer --tool racecheck python benchmarks/gpu_kernels.py --check

Without it, each kernel is timed beside a copy on the device, in turns, and what memory it must read
and write at least is counted for it; the copy reads and writes 8 bytes for each element.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import statistics
import sys
import types
from ctypes import byref, c_char_p, c_double, c_float, c_int, c_longlong, c_uint, c_void_p
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "custom_ops" / "gpu"
HEADERS = ("device.h", "adacomp_tables.h", "tables.h")
THREADS, TILE_ELEMENTS, PIECE_BINS, BLOCK_ELEMENTS = 512, 4096, 1024, 1 << 16
WHOLE_BIN_SIZE = 1024
HEADER_WORDS = 14
BETA_2, EPSILON, MOMENT_SCALE = 0.999, 1e-7, 10.0
REPEATS = 20
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # of CUdevice_attribute


class EncodeTensor(ctypes.Structure):
    """As in adacomp_tables.h."""

    _fields_ = (
        ("residual", c_void_p),
        ("second_moment", c_void_p),
        ("gradient", c_void_p),
        ("squares", c_void_p),
        ("gradient_type", c_int),
        ("sent_whole", c_int),
        ("code_bytes", c_int),
        ("bins_per_piece", c_int),
        ("size", c_longlong),
        ("bin_size", c_longlong),
        ("num_bins", c_longlong),
        ("bins_per_block", c_longlong),
        ("pieces_per_block", c_longlong),
        ("num_pieces", c_longlong),
        ("length_words", c_longlong),
        ("first_piece", c_longlong),
        ("first_bin", c_longlong),
        ("first_room", c_longlong),
    )


class EncodeStep(ctypes.Structure):
    """As in adacomp_tables.h."""

    _fields_ = (
        ("tensors", c_void_p),
        ("num_tensors", c_longlong),
        ("boost", c_float),
        ("share", c_float),
        ("decay", c_float),
        ("epsilon", c_float),
        ("moment_scale", c_float),
        ("bin_max", c_void_p),
        ("room", c_void_p),
        ("piece_codes", c_void_p),
        ("piece_sum", c_void_p),
        ("piece_byte", c_void_p),
        ("scale", c_void_p),
        ("code_words", c_void_p),
        ("first_word", c_void_p),
        ("summary", c_void_p),
        ("body", c_void_p),
    )


class EncodeSummary(ctypes.Structure):
    """As in adacomp_tables.h."""

    _fields_ = (("body_words", c_longlong), ("finite", c_int))


class DecodeSpan(ctypes.Structure):
    """As in adacomp_tables.h."""

    _fields_ = (("codes", c_void_p), ("num_codes", c_uint), ("scale", c_float))


class DecodeBlock(ctypes.Structure):
    """As in adacomp_tables.h."""

    _fields_ = (
        ("values", c_void_p),
        ("size", c_uint),
        ("bin_size", c_uint),
        ("sent_whole", c_int),
        ("code_bytes", c_int),
    )


class DecodeStep(ctypes.Structure):
    """As in adacomp_tables.h."""

    _fields_ = (
        ("blocks", c_void_p),
        ("spans", c_void_p),
        ("num_blocks", c_longlong),
        ("num_payloads", c_int),
        ("adds", c_int),
    )


def oracle():
    """`tf_gradcomp.reference.adacomp`, also where the package is not installed."""
    package = types.ModuleType("tf_gradcomp")
    package.__path__ = [str(ROOT / "tf_gradcomp")]
    sys.modules.setdefault("tf_gradcomp", package)
    from tf_gradcomp.reference import adacomp

    return adacomp


def open_first(names):
    """The first library that is there."""
    for name in names:
        try:
            return ctypes.CDLL(str(name))
        except OSError as error:
            last = error
    raise SystemExit(f"None of {', '.join(map(str, names))} can be loaded: {last}")


def nvrtc():
    """CUDA's compiler, of pip's package or the system's."""
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    packaged = [path for folder in folders for path in Path(folder, "lib").glob("libnvrtc.so.*")]
    return open_first([*packaged, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"])


def compiled(capability):
    """The kernels as code of the device."""
    library = nvrtc()
    texts = [(SOURCES / name).read_bytes() for name in HEADERS]
    program, size = c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(
        byref(program),
        (SOURCES / "adacomp.cu").read_bytes(),
        b"adacomp.cu",
        len(HEADERS),
        (c_char_p * len(HEADERS))(*texts),
        (c_char_p * len(HEADERS))(*map(str.encode, HEADERS)),
    )
    options = [f"--gpu-architecture=sm_{capability}".encode(), b"--std=c++17", b"--fmad=false"]
    options.append(b"--generate-line-info")
    error = library.nvrtcCompileProgram(program, len(options), (c_char_p * 4)(*options))
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

    def __init__(self, driver="libcuda.so.1"):
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
        for number, attribute in zip(version, (CAPABILITY_MAJOR, CAPABILITY_MINOR), strict=True):
            self._call("cuDeviceGetAttribute", byref(number), attribute, device)
        self.capability = 10 * version[0].value + version[1].value
        self._call("cuModuleLoadData", byref(self._module), compiled(self.capability))

    def _call(self, name, *args):
        error = getattr(self._driver, name)(*args)
        if error:
            raise SystemExit(f"{name} fails with error {error} of CUDA's driver.")

    def room(self, size):
        """Memory of so many bytes, which is never freed."""
        memory = ctypes.c_ulonglong()
        self._call("cuMemAlloc_v2", byref(memory), ctypes.c_size_t(max(int(size), 1)))
        return memory.value

    def put(self, values):
        """A copy of an array or a structure."""
        data = values.tobytes() if isinstance(values, np.ndarray) else bytes(values)
        memory = self.room(len(data))
        self.write(memory, data)
        return memory

    def write(self, memory, data):
        """Overwrites what is at the beginning of some memory."""
        size = ctypes.c_size_t(len(data))
        self._call("cuMemcpyHtoDAsync_v2", ctypes.c_ulonglong(memory), data, size, None)
        self.wait()

    def get(self, memory, size):
        """So many bytes."""
        data = ctypes.create_string_buffer(int(size))
        address, length = ctypes.c_ulonglong(memory), ctypes.c_size_t(int(size))
        self._call("cuMemcpyDtoHAsync_v2", data, address, length, None)
        self.wait()
        return data.raw

    def wait(self):
        """For all that was launched."""
        self._call("cuStreamSynchronize", None)

    def copy(self, source, target, size):
        """On the device."""
        addresses = ctypes.c_ulonglong(target), ctypes.c_ulonglong(source)
        self._call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(size), None)

    def launch(self, name, blocks, step):
        """A kernel with its only parameter."""
        function = c_void_p()
        self._call("cuModuleGetFunction", byref(function), self._module, name.encode())
        parameters = (c_void_p * 1)(ctypes.addressof(step))
        grid = (blocks, 1, 1, THREADS, 1, 1, 0)
        self._call("cuLaunchKernel", function, *grid, None, parameters, None)

    def seconds(self, work):
        """How long the device takes for what `work` launches."""
        events = c_void_p(), c_void_p()
        for event in events:
            self._call("cuEventCreate", byref(event), 0)
        self._call("cuEventRecord", events[0], None)
        work()
        self._call("cuEventRecord", events[1], None)
        self.wait()
        milliseconds = c_float()
        self._call("cuEventElapsedTime", byref(milliseconds), *events)
        for event in events:
            self._call("cuEventDestroy_v2", event)
        return milliseconds.value / 1000


def ceil_div(a, b):
    """The number of pieces of b that a takes."""
    return -(-a // b)


class Tensor:
    """One tensor, its memory on a device, and the kernels on it."""

    def __init__(self, gpu, residual, gradient, gradient_type, bin_size, divides=False):
        self.gpu, self.size, self.whole = gpu, residual.size, bin_size == 0
        bins = WHOLE_BIN_SIZE if self.whole else bin_size
        per_block = max(1, BLOCK_ELEMENTS // bins)
        per_piece = min(max(1, min(TILE_ELEMENTS // bins, PIECE_BINS)), per_block)
        num_bins = ceil_div(self.size, bins)
        self.blocks = ceil_div(num_bins, per_block)
        last_bins = num_bins - (self.blocks - 1) * per_block
        pieces_per_block = ceil_div(per_block, per_piece)
        pieces = (self.blocks - 1) * pieces_per_block + ceil_div(last_bins, per_piece)
        self.code_bytes = 1 if bins <= 63 else 2
        self.block_size = per_block * bins
        self.length_words = 0 if self.whole else self.blocks - 1
        self.bin_size = bins
        self.moment = gpu.put(np.full(self.size, 0.01, np.float32)) if divides else None
        self.residual = gpu.put(residual)
        table = EncodeTensor(
            self.residual,
            self.moment,
            gpu.put(gradient),
            None,
            gradient_type,
            self.whole,
            self.code_bytes,
            per_piece,
            self.size,
            bins,
            num_bins,
            per_block,
            pieces_per_block,
            pieces,
            self.length_words,
        )
        self.pieces = pieces
        room = self.size * self.code_bytes + 4
        self.step = EncodeStep(
            gpu.put(table),
            1,
            1.0,
            1 - np.float32(BETA_2),
            BETA_2,
            EPSILON,
            MOMENT_SCALE,
            gpu.room(4 * num_bins),
            gpu.room(room),
            gpu.room(4 * pieces),
            gpu.room(ctypes.sizeof(c_double) * pieces),
            gpu.room(8 * pieces),
            gpu.room(4),
            gpu.room(4),
            gpu.room(8),
            gpu.room(ctypes.sizeof(EncodeSummary)),
            gpu.room(4 * (3 + self.length_words) + (4 * self.size if self.whole else room)),
        )

    def scan(self):
        """The pass over gradient, residual and second moment."""
        self.gpu.launch("gradcomp_adacomp_scan", self.pieces, self.step)

    def pack(self):
        """All that follows it."""
        self.gpu.launch("gradcomp_adacomp_tensors", 1, self.step)
        self.gpu.launch("gradcomp_adacomp_layout", 1, self.step)
        self.gpu.launch("gradcomp_adacomp_pack", self.pieces, self.step)

    def body(self):
        """The payload behind the header, as int32."""
        size = ctypes.sizeof(EncodeSummary)
        summary = EncodeSummary.from_buffer_copy(self.gpu.get(self.step.summary, size))
        return np.frombuffer(self.gpu.get(self.step.body, 4 * summary.body_words), np.int32)

    def decoding(self, bodies):
        """What launches the decoding of some payloads, and where their sum will be."""
        spans = [span for body in bodies for span in self._spans(body)]
        values = self.gpu.room(4 * self.size)
        blocks = [
            DecodeBlock(
                values + 4 * begin,
                min(self.block_size, self.size - begin),
                self.bin_size,
                self.whole,
                self.code_bytes,
            )
            for begin in range(0, self.size, self.block_size)
        ]
        step = DecodeStep(
            self.gpu.put((DecodeBlock * len(blocks))(*blocks)),
            self.gpu.put((DecodeSpan * len(spans))(*spans)),
            len(blocks),
            len(bodies),
            0,
        )
        launch = self.gpu.launch
        return lambda: launch("gradcomp_adacomp_decode", step.num_blocks, step), values

    def _spans(self, body):
        data = self.gpu.put(body) + 8
        scale = body[:1].view(np.float32)[0]
        if self.whole:
            sizes = [self.block_size] * (self.blocks - 1)
            sizes.append(self.size - sum(sizes))
            begins = 4 * np.cumsum([0, *sizes[:-1]])
        else:
            codes = body[2 + self.length_words :].view(np.uint8 if self.code_bytes == 1 else "u2")
            lengths = body[2 : 2 + self.length_words] // self.code_bytes
            end = np.flatnonzero(codes & 1)[-1] + 1  # padding has no end of a bin
            sizes = [*lengths.tolist(), int(end - lengths.sum())]
            begins = 4 * self.length_words + self.code_bytes * np.cumsum([0, *sizes[:-1]])
        return [
            DecodeSpan(data + int(begin), size, scale)
            for begin, size in zip(begins, sizes, strict=True)
        ]


def normal(size, scale, seed):
    """Random float32 numbers."""
    return np.random.default_rng(seed).normal(scale=scale, size=size).astype(np.float32)


def same(ours, theirs, what):
    """Ends the program if two arrays differ in a bit."""
    if ours.tobytes() != theirs.tobytes():
        raise SystemExit(f"{what}: not what the oracle says.")


def check(gpu, sizes=(1, 4099, 70001, 1_000_003), bin_sizes=(0, 1, 7, 50, 63, 64, 500, 5000)):
    """Compares the kernels with the oracle."""
    adacomp = oracle()
    for size in sizes:
        for bin_size in bin_sizes:
            residual, gradient = normal(size, 1, 1), normal(size, 0.3, 2)
            upper = (gradient.view(np.uint32) >> 16).astype(np.uint16)
            for number, (given, meant) in enumerate(
                (
                    (gradient, gradient),
                    (gradient.astype(np.float16), gradient.astype(np.float16)),
                    (upper, (upper.astype(np.uint32) << 16).view(np.float32)),
                )
            ):
                what = f"{size} elements of type {number} in bins of {bin_size}"
                tensor = Tensor(gpu, residual, given, number, bin_size)
                tensor.scan()
                tensor.pack()
                payload, (left,), _ = adacomp.encode_payload(
                    [residual], [meant], 0, bin_sizes=[bin_size], fingerprint=0
                )
                same(tensor.body(), payload[HEADER_WORDS:], f"Payload of {what}")
                found = np.frombuffer(gpu.get(tensor.residual, 4 * size), np.float32)
                same(found, left, f"Residual of {what}")
                (one,) = adacomp.decode_payload(payload, [[size]], [bin_size])
                decode, values = tensor.decoding([payload[HEADER_WORDS:]] * 3)
                decode()
                total = np.frombuffer(gpu.get(values, 4 * size), np.float32)
                same(total, np.float32(0) + one + one + one, f"Sum of {what}")


def measure(gpu, sizes):
    """Prints a table of times and of bandwidths beside that of a copy."""
    print(f"{gpu.name}, sm_{gpu.capability}; the median of {REPEATS}\n")
    print("| elements | kernel | ms | GB/s at least | of a copy's |\n|---|---|---|---|---|")
    for size in sizes:
        for bin_size in (50, 500):
            measure_one(gpu, size, bin_size)


def measure_one(gpu, size, bin_size):
    """One tensor: each kernel and the copy in turns."""
    residual, gradient = normal(size, 1, 1), normal(size, 0.3, 2)
    plain = Tensor(gpu, residual, gradient, 0, bin_size)
    divided = Tensor(gpu, residual, gradient, 0, bin_size, divides=True)
    source, target = gpu.put(gradient), gpu.room(4 * size)
    works = {"a copy": (lambda: gpu.copy(source, target, 4 * size), 8)}
    for tensor, label, bytes_each in ((plain, "", 12), (divided, ", dividing", 20)):
        works[f"encode{label}: scan"] = tensor.scan, bytes_each
        works[f"encode{label}: all"] = (lambda t=tensor: (t.scan(), t.pack())), bytes_each
    for _ in range(3):  # a residual that was left by steps
        plain.scan()
        plain.pack()
    for number in (1, 8):
        works[f"decode of {number}"] = plain.decoding([plain.body()] * number)[0], 4
    times = {name: [] for name in works}
    for _ in range(REPEATS):
        for name, (work, _) in works.items():
            times[name].append(gpu.seconds(work))
    speed = {
        name: bytes_each * size / statistics.median(times[name]) / 1e9
        for name, (_, bytes_each) in works.items()
    }
    for name in works:
        milliseconds = 1000 * statistics.median(times[name])
        label = name if name == "a copy" else f"{name}, bins of {bin_size}"
        share = speed[name] / speed["a copy"]
        print(f"| {size} | {label} | {milliseconds:.3f} | {speed[name]:.0f} | {share:.0%} |")


def main():
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="compare with the oracle, and end")
    parser.add_argument(
        "--elements", type=int, nargs="+", default=[1_000_000, 25_000_000], metavar="N"
    )
    arguments = parser.parse_args()
    gpu = Gpu()
    if arguments.check:
        check(gpu)
        print(f"{gpu.name}, sm_{gpu.capability}: the kernels do what the oracle says")
    else:
        measure(gpu, arguments.elements)


if __name__ == "__main__":
    main()
