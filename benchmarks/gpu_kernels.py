"""Checks and times the GPU kernels without TensorFlow; needs a GPU, NVRTC and NumPy.

The source is `custom_ops/gpu/`, which the op library also compiles. With --check, the results of
all methods' kernels must equal the NumPy oracle's in every bit, for all types and many settings. To
find races:

    compute-sanitizer --tool racecheck python benchmarks/gpu_kernels.py --check --elements 70001

Without --check, the kernels are timed in turns with a copy on the device. The bandwidth counts the
least memory that a kernel must read and write; the copy reads and writes 8 bytes for each element.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from gpu_adacomp import ADACOMP
from gpu_device import Gpu
from gpu_methods import METHODS, Inputs, Method, Work
from gpu_power_sgd import POWER_SGD

REPEATS = 20
BYTES_IN_FRONT = 1 << 29
CHECKED_SIZES, TIMED_SIZES = (1, 4099, 70001, 1_000_003), (1_000_000, 25_000_000)
ALL_METHODS = (ADACOMP, *METHODS, POWER_SGD)


def normal(size: int, scale: float, seed: int) -> np.ndarray:
    """Random float32 numbers."""
    return np.random.default_rng(seed).normal(scale=scale, size=size).astype(np.float32)


def inputs_of(size: int) -> list[Inputs]:
    """A residual, and a gradient as float32, float16 and bfloat16."""
    residual, gradient = normal(size, 1, 1), normal(size, 0.3, 2)
    upper = (gradient.view(np.uint32) >> 16).astype(np.uint16)
    half = gradient.astype(np.float16)
    return [
        Inputs(residual, gradient, gradient, 0),
        Inputs(residual, half, half, 1),
        Inputs(residual, upper, (upper.astype(np.uint32) << 16).view(np.float32), 2),
    ]


def label(method: Method, setting: dict[str, Any]) -> str:
    """As in `QSGD, bits 4, bucket_size 1024`."""
    return ", ".join([method.name, *(f"{name} {value}" for name, value in setting.items())])


def check(gpu: Gpu, sizes: Sequence[int], methods: Sequence[Method] = ALL_METHODS) -> None:
    """Compares the kernels with the oracle, and ends the program if they differ in a bit."""
    for size in sizes:
        for inputs in inputs_of(size):
            for method in methods:
                for setting in method.checked:
                    for what, found, expected in method.on_gpu(gpu, inputs, **setting).compared():
                        if found.tobytes() != expected.tobytes():
                            raise SystemExit(
                                f"{label(method, setting)}: the {what} of {size} elements, with "
                                f"gradients of type {inputs.gradient_type}, is not what NumPy says."
                            )
            gpu.free()


def measure(gpu: Gpu, sizes: Sequence[int], methods: Sequence[Method] = ALL_METHODS) -> None:
    """Prints a table of times, and of bandwidths relative to a copy."""
    print(f"{gpu.name}, sm_{gpu.capability}; the median of {REPEATS}\n")
    print("| elements | kernels | ms | GB/s at least | of a copy's |\n|---|---|---|---|---|")
    for size in sizes:
        inputs = inputs_of(size)[0]
        for method in methods:
            for setting in method.timed:
                works = method.on_gpu(gpu, inputs, **setting).works()
                measure_relative_to_copy(gpu, inputs, label(method, setting), list(works))
                gpu.free()


def measure_relative_to_copy(gpu: Gpu, inputs: Inputs, name: str, works: list[Work]) -> None:
    """Measures each work and the copy in turns."""
    size = inputs.residual.size
    source, target = gpu.put(inputs.residual), gpu.room(4 * size)
    copy = Work("a copy", lambda: gpu.copy(source, target, 4 * size), 8)
    large_source, large_target = gpu.room(BYTES_IN_FRONT), gpu.room(BYTES_IN_FRONT)

    def copy_in_front() -> None:  # the device is busy until all is launched, and its cache is full
        gpu.copy(large_source, large_target, BYTES_IN_FRONT)

    times: list[list[float]] = [[] for _ in (copy, *works)]
    for _ in range(REPEATS):
        for work, taken in zip((copy, *works), times, strict=True):
            taken.append(gpu.seconds(work.launch, copy_in_front))
            work.finish()
    medians = [statistics.median(taken) for taken in times]
    speed_of_copy = copy.bytes_each / medians[0]
    for work, seconds in zip((copy, *works), medians, strict=True):
        speed = work.bytes_each / seconds
        print(
            f"| {size} | {name}: {work.name} | {1000 * seconds:.3f} | {speed * size / 1e9:.0f} "
            f"| {speed / speed_of_copy:.0%} |"
        )


def main() -> None:
    """Runs the checks or the measurements of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="compare with the oracle, and end")
    parser.add_argument("--elements", type=int, nargs="+", metavar="N", help="sizes of the tensor")
    names = [method.name for method in ALL_METHODS]
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="NAME")
    arguments = parser.parse_args()
    methods = [method for method in ALL_METHODS if method.name in arguments.methods]
    gpu = Gpu()
    if arguments.check:
        check(gpu, arguments.elements or CHECKED_SIZES, methods)
        print(f"{gpu.name}, sm_{gpu.capability}: the kernels do what NumPy says")
    else:
        measure(gpu, arguments.elements or TIMED_SIZES, methods)


if __name__ == "__main__":
    main()
