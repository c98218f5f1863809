"""AdaComp in NumPy: selection and quantization, codes, and whole payloads.

Chen et al., AAAI 2018, https://arxiv.org/abs/1712.02679. Every float32 operation happens in the
order of the native ops, so that results are equal to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tests.reference import payload as payload_format

METHOD = 1
MAX_8_BIT_BIN = 63
BLOCK_SIZE = 2**16


class Step(NamedTuple):
    """The results of one step of AdaComp for one tensor."""

    mask: np.ndarray  # bool [n], which elements are sent
    accumulated: np.ndarray  # float32 [n], G
    bin_max: np.ndarray  # float32 [bins]
    scale: np.float32
    sent: np.ndarray  # float32 [n], 0 where nothing is sent
    residual: np.ndarray  # float32 [n], what stays


def pack(residual: np.ndarray, gradient: np.ndarray, bin_size: int, scale_factor: float) -> Step:
    """Selects and quantizes one flat tensor (section "Algorithm" of the paper)."""
    gradient = gradient.astype(np.float32)
    boost = np.float32(scale_factor) - np.float32(1)
    with np.errstate(over="ignore", invalid="ignore"):
        accumulated = residual + gradient
        boosted = accumulated + boost * gradient
    bin_max = np.abs(_in_bins(accumulated, bin_size)).max(axis=1, initial=np.float32(0))
    reached = np.abs(_in_bins(boosted, bin_size)) >= bin_max[:, None]
    mask = reached.reshape(-1)[: accumulated.size] & (accumulated != 0)
    scale = mean_in_order(bin_max)
    sent = np.where(mask, np.sign(accumulated) * scale, np.float32(0))
    # Not `accumulated - sent`: where nothing is sent, -0 stays -0.
    left = np.where(mask, accumulated - sent, accumulated)
    return Step(mask, accumulated, bin_max, scale, sent, left)


def mean_in_order(values: np.ndarray) -> np.float32:
    """The mean, summed in float64 one after another; NumPy's own sum takes another order."""
    if values.size == 0:
        return np.float32(0)
    return np.float32(np.cumsum(values, dtype=np.float64)[-1] / values.size)


def encode_codes(mask: np.ndarray, accumulated: np.ndarray, bin_size: int) -> np.ndarray:
    """Returns a code for each sent element: in-bin index << 2 | negative << 1 | last in its bin."""
    dtype, escape = _code_type(bin_size)
    positions = np.flatnonzero(mask)
    bins = positions // bin_size
    last = np.r_[bins[1:] != bins[:-1], np.ones(min(1, bins.size), bool)]
    codes = (positions % bin_size) << 2 | (accumulated[positions] < 0) << 1 | last
    empty = np.setdiff1d(np.arange(num_bins(mask.size, bin_size)), bins)
    order = np.argsort(np.r_[bins, empty], kind="stable")
    return np.r_[codes, np.full(empty.size, escape << 2 | 1)][order].astype(dtype)


def decode_codes(codes: np.ndarray, scale: np.float32, size: int, bin_size: int) -> np.ndarray:
    """Returns the values of a tensor's codes; float32 [size]."""
    _, escape = _code_type(bin_size)
    codes = codes.astype(np.int64)
    bins = np.r_[0, np.cumsum(codes & 1)][:-1]
    if np.sum(codes & 1) != num_bins(size, bin_size):
        raise ValueError("wrong number of bins")
    index = codes >> 2
    real = index != escape
    values = np.zeros(size, np.float32)
    values[(bins * bin_size + index)[real]] = np.where(codes & 2, -scale, scale)[real]
    return values


def encode_payload(
    residuals: Sequence[np.ndarray],
    gradients: Sequence[np.ndarray],
    step: int,
    *,
    bin_sizes: Sequence[int],
    fingerprint: int,
    scale_factor: float = 2.0,
) -> tuple[np.ndarray, list[np.ndarray], list[int]]:
    """Does the work of `tf_gradcomp.ops.adacomp_encode`.

    Returns:
        The payload, the residuals after the step, and the bytes of the payload per tensor. If not
        all is finite, the payload is a header alone, and the residuals are the given ones.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        sums = [r + g.astype(np.float32) for r, g in zip(residuals, gradients, strict=True)]
    plan = payload_format.plan_of(bin_sizes)
    header = payload_format.Header(METHOD, fingerprint, step, len(sums), plan)
    if not all(np.isfinite(values).all() for values in sums):
        flagged = dataclasses.replace(header, flags=payload_format.NON_FINITE)
        return payload_format.write(flagged), list(residuals), [0] * len(sums)
    table, codes, left = [], [], []
    for residual, gradient, bin_size in zip(residuals, gradients, bin_sizes, strict=True):
        scale, data, rest = _encode_tensor(
            residual.reshape(-1), gradient.reshape(-1), bin_size, scale_factor
        )
        table.append(np.float32(scale).tobytes() + np.uint32(len(data) // 4).tobytes())
        codes.append(data)
        left.append(rest.reshape(residual.shape))
    body = b"".join(table + codes)
    tensor_bytes = [8 + len(data) for data in codes]
    return payload_format.write(header, body), left, tensor_bytes


def decode_payload(
    payload: np.ndarray, shapes: Sequence[Sequence[int]], bin_sizes: Sequence[int]
) -> list[np.ndarray] | None:
    """Decodes a replica's payload, one array per tensor; None if it was not finite."""
    header, body = payload_format.read(payload)
    if header.flags & payload_format.NON_FINITE:
        return None
    decoded = []
    start = 8 * len(shapes)
    for i, (shape, bin_size) in enumerate(zip(shapes, bin_sizes, strict=True)):
        scale = np.frombuffer(body, np.float32, 1, 8 * i)[0]
        length = 4 * int(np.frombuffer(body, np.uint32, 1, 8 * i + 4)[0])
        values = _decode_tensor(body[start : start + length], scale, int(np.prod(shape)), bin_size)
        decoded.append(values.reshape(shape))
        start += length
    return decoded


def num_bins(size: int, bin_size: int) -> int:
    """The number of bins, with the short last one."""
    return -(-size // bin_size)


def _block_elements(bin_size: int) -> int:
    return max(1, BLOCK_SIZE // bin_size) * bin_size


def _in_bins(values: np.ndarray, bin_size: int) -> np.ndarray:
    bins = num_bins(values.size, bin_size)
    return np.pad(values, (0, bins * bin_size - values.size)).reshape(bins, bin_size)


def _code_type(bin_size: int) -> tuple[type, int]:
    return (np.uint8, 63) if bin_size <= MAX_8_BIT_BIN else (np.uint16, 16383)


def _encode_tensor(
    residual: np.ndarray, gradient: np.ndarray, bin_size: int, scale_factor: float
) -> tuple[np.float32, bytes, np.ndarray]:
    if bin_size == 0:
        whole = residual + gradient.astype(np.float32)
        return np.float32(0), whole.tobytes(), np.zeros_like(whole)
    result = pack(residual, gradient, bin_size, scale_factor)
    block = _block_elements(bin_size)
    blocks = [
        encode_codes(result.mask[i : i + block], result.accumulated[i : i + block], bin_size)
        for i in range(0, residual.size, block)
    ]
    lengths = np.array([codes.nbytes for codes in blocks[:-1]], np.uint32)
    data = b"".join([lengths.tobytes(), *(codes.tobytes() for codes in blocks)])
    return result.scale, data + b"\0" * (-len(data) % 4), result.residual


def _decode_tensor(data: bytes, scale: np.float32, size: int, bin_size: int) -> np.ndarray:
    if bin_size == 0:
        return np.frombuffer(data, np.float32)
    blocks = num_bins(size, _block_elements(bin_size))
    start = 4 * max(0, blocks - 1)  # the lengths are only needed to decode blocks independently
    codes: np.ndarray = np.frombuffer(data[start:], _code_type(bin_size)[0])
    ends = np.flatnonzero(codes & 1)  # the padding has no end of a bin
    return decode_codes(codes[: ends[-1] + 1 if ends.size else 0], scale, size, bin_size)
