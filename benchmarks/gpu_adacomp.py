"""AdaComp's kernels on one tensor: bins of one size, or a tensor that is sent whole."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gpu_device import CONSTANTS, STRUCTURES, Gpu
from gpu_methods import (
    HEADER_WORDS,
    MOMENT,
    Compared,
    Inputs,
    Method,
    OnGpu,
    Work,
    adam,
    ceil_div,
    oracle,
)

GRADIENTS, STEPS_BEFORE = 8, 16


class AdaComp(OnGpu):
    """AdaComp with one bin size; 0 sends the tensor whole."""

    BLOCK_ELEMENTS, WHOLE_BIN_SIZE = 1 << 16, 1024

    def __init__(self, gpu: Gpu, inputs: Inputs, bin_size: int, divides: bool = False) -> None:
        super().__init__(gpu, inputs)
        self.bin_size, self.whole, self.divides = bin_size, bin_size == 0, divides
        self.bins = bin_size or self.WHOLE_BIN_SIZE
        per_block = max(1, self.BLOCK_ELEMENTS // self.bins)
        in_tile = CONSTANTS["kPieceElements"] // self.bins
        per_piece = min(max(1, min(in_tile, CONSTANTS["kPieceBins"])), per_block)
        num_bins = ceil_div(self.size, self.bins)
        self.blocks = ceil_div(num_bins, per_block)
        last_bins = num_bins - (self.blocks - 1) * per_block
        pieces_per_block = ceil_div(per_block, per_piece)
        self.pieces = (self.blocks - 1) * pieces_per_block + ceil_div(last_bins, per_piece)
        self.code_bytes = 1 if self.bins <= 63 else 2
        self.block_size = per_block * self.bins
        self.length_words = 0 if self.whole else self.blocks - 1
        moment = gpu.put(np.full(self.size, MOMENT, np.float32)) if divides else None
        self.tensor = STRUCTURES["EncodeTensor"](
            residual=self.residual,
            second_moment=moment,
            gradient=self.gradient,
            gradient_type=inputs.gradient_type,
            sent_whole=self.whole,
            code_bytes=self.code_bytes,
            bins_per_piece=per_piece,
            size=self.size,
            bin_size=self.bins,
            num_bins=num_bins,
            bins_per_block=per_block,
            pieces_per_block=pieces_per_block,
            num_pieces=self.pieces,
            length_words=self.length_words,
            adam=adam(np.float32(10)),
        )
        room = self.size * self.code_bytes + 4
        self.summary_type = STRUCTURES["EncodeSummary"]
        self.step = STRUCTURES["EncodeStep"](
            tensors=gpu.put(self.tensor),
            num_tensors=1,
            num_pieces=self.pieces,
            not_finite=gpu.zeros(4),
            boost=1,
            bin_max=gpu.room(4 * num_bins),
            room=gpu.room(room),
            piece_codes=gpu.room(4 * self.pieces),
            piece_sum=gpu.room(8 * self.pieces),
            piece_byte=gpu.room(8 * self.pieces),
            scale=gpu.room(4),
            code_words=gpu.room(4),
            first_word=gpu.room(8),
            summary=gpu.room(ctypes.sizeof(self.summary_type)),
            body=gpu.room(4 * (3 + self.length_words) + (4 * self.size if self.whole else room)),
        )

    def scan(self) -> None:
        """The pass over gradient, residual and second moment."""
        self._by_pieces("scan")

    def encode(self) -> None:
        """Launches all kernels of an encoding: check, scan and pack."""
        self._by_pieces("check")
        self.scan()
        self.pack()

    def pack(self) -> None:
        """Launches the kernels that follow the scan."""
        self.gpu.launch("gradcomp_adacomp_tensors", 1, self.step)
        self.gpu.launch("gradcomp_adacomp_layout", 1, self.step)
        self._by_warps("pack", self.pieces, self.step)

    def unpack(self) -> None:
        """Reverts `encode`."""
        self._by_warps("unpack", self.pieces, self.step)

    def _by_pieces(self, kernel: str) -> None:
        threads = CONSTANTS["kScanThreads"]
        self.gpu.launch(f"gradcomp_adacomp_{kernel}", self.pieces, self.step, threads)

    def _by_warps(self, kernel: str, warps: int, step: Any) -> None:
        blocks = ceil_div(warps, CONSTANTS["kWarps"])
        self.gpu.launch(f"gradcomp_adacomp_{kernel}", blocks, step)

    def works(self) -> Iterator[Work]:
        """A step's encoding, and decoding."""
        bytes_each = 20 if self.divides else 12
        steps = itertools.cycle(self._steps())

        def begin_next() -> None:
            self.step = next(steps)

        def pack() -> None:
            self.pack()
            begin_next()

        for _ in range(STEPS_BEFORE):
            self.encode()
            begin_next()
        yield Work("scan", self.scan, bytes_each, pack)
        yield Work("encode", self.encode, bytes_each, begin_next)
        if self.divides:
            return
        self.encode()
        for count in (1, 8):
            yield Work(f"decode of {count}", self.decoding([self.body()] * count)[0], 4)

    def _steps(self) -> Iterator[Any]:
        """Takes steps with different gradients, as in training."""
        for i in range(GRADIENTS):
            gradient = np.roll(self.inputs.gradient, i * (self.size // GRADIENTS) + i)
            self.tensor.gradient = self.gpu.put(gradient)
            step = type(self.step).from_buffer_copy(self.step)
            step.tensors = self.gpu.put(self.tensor)
            yield step

    def compared(self) -> Iterator[Compared]:
        """Yields payload, residual and sum, and the state after encoding is reverted."""
        if self.divides:
            return  # conformance tests check the last bits of second moments
        adacomp = oracle("adacomp")
        before, meant = self.inputs.residual, self.inputs.meant
        payload, (residual,), _ = adacomp.encode_payload(
            [before], [meant], 0, bin_sizes=[self.bin_size], fingerprint=0
        )
        self.encode()
        yield "payload", self.body(), payload[HEADER_WORDS:]
        yield "residual", self.floats(self.residual), residual
        (decoded,) = adacomp.decode_payload(payload, [[self.size]], [self.bin_size])
        count = CONSTANTS["kPayloadsAtOnce"] + 1
        decode, values = self.decoding([payload[HEADER_WORDS:]] * count)
        decode()
        yield "sum", self.floats(values), sum([decoded] * count, np.zeros_like(decoded))
        self.unpack()
        restored = residual + decoded - meant.astype(np.float32)
        yield "residual taken back", self.floats(self.residual), restored

    def body(self) -> np.ndarray:
        """The payload after the header, as int32."""
        data = self.gpu.get(self.step.summary, ctypes.sizeof(self.summary_type))
        words = self.summary_type.from_buffer_copy(data).body_words
        return np.frombuffer(self.gpu.get(self.step.body, 4 * words), np.int32)

    def decoding(self, bodies: list[np.ndarray]) -> tuple[Callable[[], None], int]:
        """Returns a function that launches the decoding of `bodies`, and the address of the sum."""
        spans = [span for body in bodies for span in self._spans(body)]
        values = self.gpu.room(4 * self.size)
        block_type = STRUCTURES["DecodeBlock"]
        fitting = max(1, CONSTANTS["kUnitElements"] // self.bins)
        even = 4 // math.gcd(4, self.bins)
        bins_per_unit = fitting if fitting < even else fitting - fitting % even
        blocks = []
        for begin in range(0, self.size, self.block_size):
            size = min(self.block_size, self.size - begin)
            blocks.append(
                block_type(
                    values=values + 4 * begin,
                    size=size,
                    bin_size=self.bins,
                    bins_per_unit=bins_per_unit,
                    sent_whole=self.whole,
                    code_bytes=self.code_bytes,
                )
            )
        step = STRUCTURES["DecodeStep"](
            blocks=self.gpu.put((block_type * len(blocks))(*blocks)),
            spans=self.gpu.put((STRUCTURES["DecodeSpan"] * len(spans))(*spans)),
            num_blocks=len(blocks),
            num_payloads=len(bodies),
        )

        def decode() -> None:
            self.gpu.launch("gradcomp_adacomp_decode", len(blocks), step)

        return decode, values

    def _spans(self, body: np.ndarray) -> list[Any]:
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
            STRUCTURES["DecodeSpan"](codes=data + int(begin), num_codes=size, scale=scale)
            for begin, size in zip(begins, sizes, strict=True)
        ]


ADACOMP = Method(
    "AdaComp",
    AdaComp,
    tuple({"bin_size": size} for size in (0, 1, 7, 50, 63, 64, 255, 501, 5000)),
    (
        {"bin_size": 50},
        {"bin_size": 50, "divides": True},
        {"bin_size": 500},
        {"bin_size": 500, "divides": True},
    ),
)
