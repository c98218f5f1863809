"""The kernels of each method on one tensor: arguments, launches, and NumPy's results."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gpu_device import CONSTANTS, STRUCTURES, Gpu

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the oracles in tests/
HEADER_WORDS = 14
STEP, REPLICA, BETA_2, EPSILON, FILTER = 5, 3, 0.999, 1e-7, 0.3
MOMENT = 0.01  # of each element, before the first step
THREADS, LANES = CONSTANTS["kThreads"], CONSTANTS["kLanes"]
SLICE = CONSTANTS["kSliceElements"]


def oracle(name: str) -> Any:
    """Returns the method `name` in NumPy, `tests/reference/<name>.py`."""
    return importlib.import_module(f"tests.reference.{name}")


def ceil_div(a: int, b: int) -> int:
    """The number of pieces of b that a takes."""
    return -(-a // b)


def slices(size: int) -> int:
    """Returns the number of blocks that process `size` elements."""
    return ceil_div(size, SLICE)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A tensor's residual and gradient, which has one of three types."""

    residual: np.ndarray
    gradient: np.ndarray  # as it lies in memory
    meant: np.ndarray  # as NumPy can read it
    gradient_type: int


@dataclasses.dataclass(frozen=True)
class Work:
    """Some launches, which are timed together."""

    name: str
    launch: Callable[[], None]
    bytes_each: float  # the least memory to read and write, for an element
    finish: Callable[[], None] = lambda: None  # the rest of a step, which is not timed


# The name of a result, the GPU's value, and NumPy's value.
Compared = tuple[str, np.ndarray, np.ndarray]


def adam(scale: np.float32) -> Any:
    """Returns Adam's constants for updates of and division by a second moment; see tables.h."""
    decay = np.float32(BETA_2)
    return STRUCTURES["Adam"](
        share=np.float32(1) - decay, decay=decay, epsilon=EPSILON, root_of_scale=np.sqrt(scale)
    )


class OnGpu:
    """A method on one tensor of a GPU; it may be launched any number of times."""

    def __init__(self, gpu: Gpu, inputs: Inputs) -> None:
        self.gpu, self.inputs, self.size = gpu, inputs, inputs.residual.size
        self.residual = gpu.put(inputs.residual)
        self.gradient = gpu.put(inputs.gradient)

    def works(self) -> Iterator[Work]:
        """Yields the work to time; afterwards, results can no longer be compared."""
        raise NotImplementedError

    def compared(self) -> Iterator[Compared]:
        """Runs each kernel, and yields its results."""
        raise NotImplementedError

    def floats(self, memory: int, size: int | None = None) -> np.ndarray:
        """Downloads float32 numbers; by default as many as the tensor has."""
        return np.frombuffer(self.gpu.get(memory, 4 * (size or self.size)), np.float32)


class Precondition(OnGpu):
    """The division by the root of the second moment."""

    def __init__(self, gpu: Gpu, inputs: Inputs) -> None:
        super().__init__(gpu, inputs)
        self.moment = gpu.put(np.full(self.size, MOMENT, np.float32))
        self.divided = gpu.room(4 * self.size)
        tensor = STRUCTURES["DividedTensor"](
            second_moment=self.moment,
            gradient=self.gradient,
            preconditioned=self.divided,
            gradient_type=inputs.gradient_type,
            size=self.size,
            adam=adam(np.float32(1 / (1 - np.float64(np.float32(BETA_2)) ** STEP))),
        )
        self.step = STRUCTURES["PreconditionStep"](
            tensors=gpu.put(tensor),
            num_tensors=1,
            not_finite=gpu.zeros(4),
        )

    def divide(self) -> None:
        """Both launches."""
        self.gpu.launch("gradcomp_precondition_check", slices(self.size), self.step)
        self.gpu.launch("gradcomp_precondition_divide", slices(self.size), self.step)

    def works(self) -> Iterator[Work]:
        """The division."""
        yield Work("divide", self.divide, 16)

    def compared(self) -> Iterator[Compared]:
        """Yields the divided gradient and the second moment, with their expected values."""
        self.divide()
        divided, moment = oracle("precondition").precondition(
            np.full(self.size, MOMENT, np.float32),
            self.inputs.meant,
            STEP,
            beta_2=BETA_2,
            epsilon=EPSILON,
        )
        yield "divided gradient", self.floats(self.divided), divided
        yield "second moment", self.floats(self.moment), moment


class Chunks(OnGpu):
    """A step of ScaleCom and RandomK by a single replica, whose values are the total."""

    def __init__(self, gpu: Gpu, inputs: Inputs, chunk_size: int) -> None:
        super().__init__(gpu, inputs)
        self.chunk_size = chunk_size
        self.width = 1 if chunk_size <= 16 else LANES if chunk_size < 4096 else THREADS
        self.chunks = ceil_div(self.size, chunk_size)
        bits = (chunk_size - 1).bit_length()
        self.words = ceil_div(self.chunks * bits, 32)
        self.pieces = ceil_div(self.chunks, THREADS // self.width)
        self.output = gpu.room(4 * self.size)
        self.taken = gpu.room(4 * self.chunks)
        tensor = STRUCTURES["ChunkTensor"](
            residual=self.residual,
            gradient=self.gradient,
            output=self.output,
            gradient_type=inputs.gradient_type,
            width=self.width,
            size=self.size,
            chunk_size=chunk_size,
            bits=bits,
            num_chunks=self.chunks,
        )
        self.step = STRUCTURES["ChunkStep"](
            tensors=gpu.put(tensor),
            num_tensors=1,
            num_chunks=self.chunks,
            num_words=self.words,
            chosen=gpu.room(4 * self.chunks),
            not_finite=gpu.zeros(4),
            offsets=gpu.room(4 * self.words),
            values=self.taken,
            filter=FILTER,
            kept_share=np.float32(1) - np.float32(FILTER),
        )
        self.last = type(self.step).from_buffer_copy(self.step)
        self.last.values = gpu.room(4 * self.chunks)  # the share that is kept
        self.last.totals = self.taken

    def _by_threads(self, kernel: str, threads: int, step: Any) -> None:
        if threads:
            self.gpu.launch(f"gradcomp_chunks_{kernel}", ceil_div(threads, THREADS), step)

    def select(self) -> None:
        """Chooses and packs offsets."""
        self.gpu.launch("gradcomp_chunks_choose", self.pieces, self.step)
        self._by_threads("pack", self.words, self.step)

    def take(self) -> None:
        """Takes the sent values."""
        self._by_threads("take", self.chunks, self.step)

    def apply(self) -> None:
        """Spreads the totals, and keeps the unsent values."""
        self._by_threads("keep", self.chunks, self.last)
        self.gpu.launch("gradcomp_chunks_spread", slices(self.size), self.last)
        self._by_threads("place", self.chunks, self.last)

    def works(self) -> Iterator[Work]:
        """The parts of a step."""
        yield Work("select", self.select, 8)
        yield Work("take", self.take, 12 / self.chunk_size)
        yield Work("apply", self.apply, 16)

    def compared(self) -> Iterator[Compared]:
        """Yields the results of each part of a step, with their expected values."""
        chunks = oracle("chunks")
        before, gradient = self.inputs.residual, self.inputs.meant.astype(np.float32)
        sums = before + gradient
        offsets = chunks.select(sums, self.chunk_size)
        at = chunks.places(offsets, self.chunk_size)
        self.select()
        packed = np.frombuffer(self.gpu.get(self.step.offsets, 4 * self.words), np.int32)
        yield "offsets", packed, chunks.pack(offsets, self.chunk_size)
        self.take()
        yield "what is taken", self.floats(self.taken, self.chunks), sums[at]
        self.apply()
        total = np.zeros(self.size, np.float32)
        total[at] = sums[at]
        yield "total", self.floats(self.output), total
        yield "residual", self.floats(self.residual), chunks.keep(before, gradient, at, FILTER)


class FixedLength(OnGpu):
    """A method with payloads of fixed length; a main setting of 0 sends the tensor whole."""

    reference: ClassVar[str]  # the oracle; the prefix of the kernels' names
    structures: ClassVar[str]  # the prefix of the structures' names

    def __init__(
        self,
        gpu: Gpu,
        inputs: Inputs,
        words: int,
        launches: Sequence[tuple[str, int]],
        tensor: Mapping[str, Any],
        step: Mapping[str, Any],
        layout: Mapping[str, Any],
        to_encode: Mapping[str, Any],
    ) -> None:
        """Takes the differences between methods.

        Args:
            gpu: The GPU.
            inputs: The tensor.
            words: The number of words of the payload after its header.
            launches: The kernels that encode, and their numbers of blocks.
            tensor: The method's own fields of the tensor's structure.
            step: The method's own fields of the encoders' structure.
            layout: Arguments of the oracle's functions.
            to_encode: Further arguments of the oracle's `encode_payload`.
        """
        super().__init__(gpu, inputs)
        self.words, self.launches, self.layout, self.to_encode = words, launches, layout, to_encode
        self.tensor = STRUCTURES[f"{self.structures}Tensor"](
            values=self.residual,
            gradient=self.gradient,
            gradient_type=inputs.gradient_type,
            size=self.size,
            **tensor,
        )
        self.step = STRUCTURES[f"{self.structures}EncodeStep"](
            tensors=gpu.put(self.tensor),
            num_tensors=1,
            not_finite=gpu.zeros(4),
            body=gpu.zeros(4 * words),
            **step,
        )

    def encode(self) -> None:
        """All launches."""
        for kernel, blocks in self.launches:
            self.gpu.launch(f"gradcomp_{self.reference}_{kernel}", blocks, self.step)

    def decoding(self, bodies: list[np.ndarray]) -> tuple[Callable[[], None], int]:
        """Returns a function that launches the decoding of `bodies`, and the address of the sum."""
        values = self.gpu.room(4 * self.size)
        tensor = type(self.tensor).from_buffer_copy(self.tensor)
        tensor.values = values
        step = STRUCTURES["FixedDecodeStep"](
            tensors=self.gpu.put(tensor),
            num_tensors=1,
            bodies=self.gpu.put(np.concatenate(bodies)),
            row_words=self.words,
            num_payloads=len(bodies),
        )
        kernel, blocks = f"gradcomp_{self.reference}_decode", slices(self.size)
        return lambda: self.gpu.launch(kernel, blocks, step), values

    def works(self) -> Iterator[Work]:
        """The encoding of a step, and the decoding."""
        sent_each = 4 * self.words / self.size
        self.encode()
        yield Work("encode", self.encode, 12 + sent_each)
        for count in (1, 8):
            decode, _ = self.decoding([self.body()] * count)
            yield Work(f"decode of {count}", decode, 4 + count * sent_each)

    def compared(self) -> Iterator[Compared]:
        """Payload, residual and sum."""
        reference = oracle(self.reference)
        before, meant = self.inputs.residual, self.inputs.meant
        payload, (residual,), _ = reference.encode_payload(
            [before], [meant], STEP, fingerprint=0, **self.layout, **self.to_encode
        )
        self.encode()
        yield "payload", self.body(), payload[HEADER_WORDS:]
        yield "residual", self.floats(self.residual), residual
        (decoded,) = reference.decode_payload(payload, [[self.size]], **self.layout)
        decode, values = self.decoding([payload[HEADER_WORDS:]] * 3)
        decode()
        yield "sum", self.floats(values), np.float32(0) + decoded + decoded + decoded

    def body(self) -> np.ndarray:
        """The payload after the header, as int32."""
        return np.frombuffer(self.gpu.get(self.step.body, 4 * self.words), np.int32)


class TopK(FixedLength):
    """A share of the entries."""

    reference, structures = "top_k", "TopK"
    DIGITS = (
        (20, 1 << 11),
        (10, 1 << 10),
        (0, 1 << 10),
    )  # the shift of a digit, and its number of values

    def __init__(self, gpu: Gpu, inputs: Inputs, density: float) -> None:
        size = inputs.residual.size
        blocks, entries = slices(size), ceil_div(size, int(1 / density)) if density else 0
        self.start = gpu.put(STRUCTURES["TopKLast"](rank=entries))
        super().__init__(
            gpu,
            inputs,
            words=2 * entries or size,
            launches=(("tally", blocks), ("places", 1), ("send", blocks)),
            tensor={"entries": entries, "sent_whole": not entries},
            step={
                "histograms": gpu.zeros(8 * CONSTANTS["kTopKDigits"]),
                "last": gpu.room(ctypes.sizeof(STRUCTURES["TopKLast"])),
                "counts": gpu.room(blocks * ctypes.sizeof(STRUCTURES["TopKCounts"])),
            },
            layout={"entries": [entries]},
            to_encode={},
        )

    def encode(self) -> None:
        """Finds the last sent entry, and sends."""
        self.gpu.copy(self.start, self.step.last, ctypes.sizeof(STRUCTURES["TopKLast"]))
        for shift, num_digits in self.DIGITS:
            self.step.shift, self.step.num_digits = shift, num_digits
            self.gpu.launch("gradcomp_top_k_count", slices(self.size), self.step)
            self.gpu.launch("gradcomp_top_k_pick", 1, self.step)
        super().encode()


class Qsgd(FixedLength):
    """Levels of some bits."""

    reference, structures = "qsgd", "Qsgd"

    def __init__(self, gpu: Gpu, inputs: Inputs, bits: int, bucket_size: int) -> None:
        size = inputs.residual.size
        measured = bucket_size if bits else SLICE
        buckets = ceil_div(size, measured)
        width = LANES if measured <= 4096 else THREADS
        super().__init__(
            gpu,
            inputs,
            words=2 * buckets + ceil_div(size * bits, 32) if bits else size,
            launches=(("measure", ceil_div(buckets, THREADS // width)), ("send", slices(size))),
            tensor={"bits": bits, "bucket_size": measured, "width": width, "sent_whole": not bits},
            step={
                "scales": gpu.room(buckets * ctypes.sizeof(STRUCTURES["QsgdScale"])),
                "replica": REPLICA,
                "step": STEP,
            },
            layout={"bits": [bits], "bucket_size": bucket_size},
            to_encode={"replica": REPLICA},
        )


class SignSgd(FixedLength):
    """One bit."""

    reference, structures = "sign_sgd", "SignSgd"

    def __init__(self, gpu: Gpu, inputs: Inputs) -> None:
        size = inputs.residual.size
        blocks = ceil_div(size, CONSTANTS["kSignSgdBlock"])
        super().__init__(
            gpu,
            inputs,
            words=1 + ceil_div(size, 32),
            launches=(("sum", blocks), ("mean", 1), ("send", slices(size))),
            tensor={"num_blocks": blocks},
            step={"block_sums": gpu.room(8 * blocks), "means": gpu.room(4)},
            layout={},
            to_encode={},
        )


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table: the work that is compared with NumPy and timed."""

    name: str
    on_gpu: Callable[..., OnGpu]
    checked: tuple[dict[str, Any], ...] = ({},)
    timed: tuple[dict[str, Any], ...] = ({},)


METHODS = (
    Method("precondition", Precondition),
    Method(
        "chunks",
        Chunks,
        tuple({"chunk_size": size} for size in (1, 7, 50, 5000)),
        ({"chunk_size": 100},),
    ),
    Method(
        "TopK",
        TopK,
        tuple({"density": density} for density in (0, 0.001, 0.25, 1)),
        ({"density": 0.01},),
    ),
    Method(
        "QSGD",
        Qsgd,
        (
            {"bits": 0, "bucket_size": 32},
            {"bits": 2, "bucket_size": 32},
            {"bits": 3, "bucket_size": 96},
            {"bits": 4, "bucket_size": 1024},
            {"bits": 8, "bucket_size": 65536},
        ),
        ({"bits": 4, "bucket_size": 1024}, {"bits": 8, "bucket_size": 1024}),
    ),
    Method("SignSGD", SignSgd),
)
