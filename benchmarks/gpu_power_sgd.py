"""Compares PowerSGD's kernels on one matrix with NumPy, which adds in the same order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
from gpu_device import CONSTANTS, STRUCTURES, Gpu
from gpu_methods import THREADS, Compared, Inputs, Method, OnGpu, Work, ceil_div, slices

ROW_LANES = CONSTANTS["kRowLanes"]
BLOCK_ELEMENTS, BLOCK_ROWS, BLOCK_COLUMNS = 1 << 17, 1 << 12, 1 << 9


def added(values: np.ndarray, axis: int) -> np.ndarray:
    """Returns the sum along an axis, added one by one as float32; never -0."""
    return np.add.accumulate(values, axis, np.float32).take(-1, axis) + np.float32(0)


class PowerSgd(OnGpu):
    """Returns the whole rows among a tensor's first elements; a smaller tensor is sent whole."""

    def __init__(self, gpu: Gpu, inputs: Inputs, rank: int, columns: int) -> None:
        super().__init__(gpu, inputs)
        self.rows, self.columns = self.size // columns, columns
        self.rank = rank if self.rows else 0
        if not self.rank:
            self.rows, self.columns = 1, self.size
        self.elements = self.rows * self.columns
        generator = np.random.default_rng(3)
        self.start, self.left, self.total = (
            generator.normal(size=(self.rank, length)).astype(np.float32)
            for length in (self.columns, self.rows, self.columns)
        )
        self.block_columns = min(BLOCK_COLUMNS, self.columns)
        self.block_rows = min(BLOCK_ROWS, BLOCK_ELEMENTS // self.block_columns)
        row_blocks = ceil_div(self.rows, self.block_rows)
        column_blocks = ceil_div(self.columns, self.block_columns)
        self.blocks = row_blocks * column_blocks
        self.output = gpu.room(4 * self.elements)
        matrix = STRUCTURES["Matrix"](
            residual=self.residual,
            gradient=self.gradient,
            output=self.output,
            gradient_type=inputs.gradient_type,
            rows=self.rows,
            columns=self.columns,
            rank=self.rank,
            size=self.elements,
            block_rows=self.block_rows,
            block_columns=self.block_columns,
            column_blocks=column_blocks,
            row_blocks=row_blocks,
        )
        left_size = max(self.rank * self.rows, self.elements if not self.rank else 0)
        self.found_left = gpu.room(4 * left_size)
        self.found_right = gpu.room(4 * max(1, self.rank * self.columns))
        self.first = STRUCTURES["PowerSgdStep"](
            matrices=gpu.put(matrix),
            num_matrices=1,
            right_size=self.rank * self.columns,
            start=gpu.put(self.start) if self.rank else None,
            left=self.found_left,
            right=self.found_right,
            total=gpu.put(self.total) if self.rank else None,
            parts=gpu.room(4 * max(1, self.blocks * self.rank * self.block_columns)),
            not_finite=gpu.zeros(4),
        )
        # The later kernels get the sum of P, which is orthonormal.
        self.second = type(self.first).from_buffer_copy(self.first)
        if self.rank:
            self.second.left = gpu.put(self.left)
        self.kept = type(self.first).from_buffer_copy(self.first)
        matrix.too_large = 1
        self.kept.matrices = gpu.put(matrix)

    def multiply_right(self) -> None:
        """P."""
        rows = self.rows if self.rank else 0
        pieces = ceil_div(rows, THREADS // ROW_LANES) if rows else slices(self.elements)
        self.gpu.launch("gradcomp_power_sgd_left", pieces, self.first)

    def multiply_left(self) -> None:
        """Q."""
        if self.rank:
            self.gpu.launch("gradcomp_power_sgd_right", self.blocks, self.second)
            threads = self.rank * self.columns
            self.gpu.launch("gradcomp_power_sgd_join", ceil_div(threads, THREADS), self.second)

    def reduce(self) -> None:
        """Both products."""
        self.gpu.launch("gradcomp_power_sgd_reduce", slices(self.elements), self.second)

    def keep(self, step: ctypes.Structure) -> None:
        """Launches the kernel that keeps the sums of a skipped step in the residual."""
        self.gpu.launch("gradcomp_power_sgd_keep", slices(self.elements), step)

    def works(self) -> Iterator[Work]:
        """The parts of a step."""
        yield Work("P", self.multiply_right, 8)
        yield Work("Q", self.multiply_left, 8)
        yield Work("reduce", self.reduce, 16)

    def compared(self) -> Iterator[Compared]:
        """Yields the results of each part of a step, with their expected values."""
        meant = self.inputs.meant.astype(np.float32)
        sums = (self.inputs.residual + meant)[: self.elements].reshape(self.rows, self.columns)
        self.multiply_right()
        left = self.expected_left(sums) if self.rank else sums
        yield "left factor", self.floats(self.found_left, left.size), left
        product, residual = left, np.zeros_like(sums)
        if self.rank:
            self.multiply_left()
            right = self.expected_right(sums)
            yield "right factor", self.floats(self.found_right, right.size), right
            product, residual = residual, sums.copy()
            for k in range(self.rank):
                residual -= self.left[k][:, np.newaxis] * right[k]
                product += self.left[k][:, np.newaxis] * self.total[k]
        self.reduce()
        yield "product", self.floats(self.output, self.elements), product
        yield "residual", self.floats(self.residual, self.elements), residual
        self.keep(self.first)
        restored = residual + meant[: self.elements].reshape(residual.shape)
        yield (
            "residual of a step that is skipped",
            self.floats(self.residual, self.elements),
            restored,
        )
        self.keep(self.kept)
        yield (
            "residual of sums too large",
            self.floats(self.residual, restored.size),
            np.zeros_like(restored),
        )

    def expected_left(self, sums: np.ndarray) -> np.ndarray:
        """Returns P; a block sums every eighth column in a lane, and then the lanes."""
        left = []
        for factor in self.start:
            parts = []
            for begin in range(0, self.columns, self.block_columns):
                end = min(begin + self.block_columns, self.columns)
                products = sums[:, begin:end] * factor[begin:end]
                padding = -(end - begin) % ROW_LANES
                lanes = np.pad(products, ((0, 0), (0, padding))).reshape(self.rows, -1, ROW_LANES)
                lane_sums = added(lanes, 1)
                while lane_sums.shape[1] > 1:
                    lane_sums = np.add(*np.split(lane_sums, 2, axis=1))
                parts.append(lane_sums[:, 0])
            left.append(added(np.array(parts), 0))
        return np.array(left)

    def expected_right(self, sums: np.ndarray) -> np.ndarray:
        """Returns Q, where the rows of each block are summed first, and then the blocks."""
        right = []
        for column in self.left:
            products = sums * column[:, np.newaxis]
            begins = range(0, self.rows, self.block_rows)
            parts = [added(products[begin : begin + self.block_rows], 0) for begin in begins]
            right.append(added(np.array(parts), 0))
        return np.array(right)


POWER_SGD = Method(
    "PowerSGD",
    PowerSgd,
    ({"rank": 2, "columns": 7}, {"rank": 5, "columns": 520}),
    ({"rank": 4, "columns": 512}, {"rank": 32, "columns": 512}),
)
