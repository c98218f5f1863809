"""SignSGD with error feedback in NumPy: signs, mean magnitude, and whole payloads.

Karimireddy et al., ICML 2019, https://arxiv.org/abs/1901.09847. Every floating-point operation
happens in the order of the native ops, so that results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference import fixed_length
from tests.reference import payload as payload_format

METHOD = 3
BLOCK_SIZE = 2**16
LANES = 8


class SignSgd:
    """The mean magnitude of a tensor, and a bit per element: 1 if it is negative, not -0."""

    def encode(self, values: np.ndarray) -> bytes:
        """The mean, then the signs; nothing for a tensor without elements."""
        if values.size == 0:
            return b""
        return mean_magnitude(values).tobytes() + fixed_length.pack_bits(values < 0, 1)

    def decode(self, data: bytes, size: int) -> np.ndarray:
        """+mean or -mean for each element."""
        if size == 0:
            return np.zeros(0, np.float32)
        mean = np.frombuffer(data, np.float32, 1)[0]
        return np.where(fixed_length.unpack_bits(data[4:], 1, size), -mean, mean)


def mean_magnitude(values: np.ndarray) -> np.float32:
    """The mean of |values|, summed in float64.

    Element i of a block of 65,536 is added to sum i mod 8 of the block, one after another; then
    these 8 are added, and then the blocks.
    """
    blocks = []
    for start in range(0, values.size, BLOCK_SIZE):
        block = np.abs(values[start : start + BLOCK_SIZE]).astype(np.float64)
        lanes = np.pad(block, (0, -block.size % LANES)).reshape(-1, LANES)
        blocks.append(_in_order(_in_order(lanes)))
    return np.float32(_in_order(np.array(blocks)) / values.size)


def encode_payload(
    residuals: Sequence[np.ndarray], gradients: Sequence[np.ndarray], step: int, *, fingerprint: int
) -> tuple[np.ndarray, list[np.ndarray], list[int]]:
    """Does the work of `tf_gradcomp.ops.sign_sgd_encode`: see `fixed_length.encode_payload`."""
    plan = payload_format.plan_of()
    header = payload_format.Header(METHOD, fingerprint, step, len(residuals), plan)
    return fixed_length.encode_payload(header, [SignSgd()] * len(residuals), residuals, gradients)


def decode_payload(payload: np.ndarray, shapes: Sequence[Sequence[int]]) -> list[np.ndarray] | None:
    """Decodes a replica's payload, one array per tensor; None if it was not finite."""
    return fixed_length.decode_payload(payload, [SignSgd()] * len(shapes), shapes)


def _in_order(values: np.ndarray) -> np.ndarray:
    """The sum over the first axis, one after another; NumPy's own sum takes another order."""
    return np.cumsum(values, axis=0)[-1]
