"""Payloads whose length follows from shapes and settings: the header, then each tensor's words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tests.reference import payload as payload_format


class Codec(Protocol):
    """The format in which a method writes one tensor."""

    def encode(self, values: np.ndarray) -> bytes:
        """Whole words that say something of `values`, which are float32 [n] and finite."""

    def decode(self, data: bytes, size: int) -> np.ndarray:
        """Returns the values of the words; float32 [size]."""


class Whole:
    """Sends a tensor as it is."""

    def encode(self, values: np.ndarray) -> bytes:
        """Returns the elements, one word each."""
        return values.tobytes()

    def decode(self, data: bytes, size: int) -> np.ndarray:
        """The elements."""
        return np.frombuffer(data, np.float32, size)


def encode_payload(
    header: payload_format.Header,
    codecs: Sequence[Codec],
    residuals: Sequence[np.ndarray],
    gradients: Sequence[np.ndarray],
) -> tuple[np.ndarray, list[np.ndarray], list[int]]:
    """Does the work of the ops `<method>_encode`.

    Returns:
        The payload, the residuals after the step, and the bytes of the payload per tensor. If not
        all sums are finite, the payload has the flag and zeros, and the residuals are unchanged.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        sums = [r + g.astype(np.float32) for r, g in zip(residuals, gradients, strict=True)]
    lengths = [
        len(codec.encode(np.zeros(total.size, np.float32)))
        for codec, total in zip(codecs, sums, strict=True)
    ]
    if not all(np.isfinite(total).all() for total in sums):
        flagged = dataclasses.replace(header, flags=payload_format.NON_FINITE)
        return payload_format.write(flagged, bytes(sum(lengths))), list(residuals), lengths
    parts = [codec.encode(total.reshape(-1)) for codec, total in zip(codecs, sums, strict=True)]
    left = [
        total - codec.decode(part, total.size).reshape(total.shape)
        for codec, part, total in zip(codecs, parts, sums, strict=True)
    ]
    return payload_format.write(header, b"".join(parts)), left, lengths


def decode_payload(
    payload: np.ndarray, codecs: Sequence[Codec], shapes: Sequence[Sequence[int]]
) -> list[np.ndarray] | None:
    """Decodes a replica's payload, one array per tensor; None if it was not finite."""
    header, body = payload_format.read(payload)
    if header.flags & payload_format.NON_FINITE:
        return None
    decoded = []
    start = 0
    for codec, shape in zip(codecs, shapes, strict=True):
        size = int(np.prod(shape))
        end = start + len(codec.encode(np.zeros(size, np.float32)))
        decoded.append(codec.decode(body[start:end], size).reshape(shape))
        start = end
    return decoded


def pack_bits(codes: np.ndarray, bits: int) -> bytes:
    """Codes of a few bits, one behind the other from the lowest bit on, in whole words."""
    parts = np.unpackbits(codes.astype(np.uint8)[:, None], axis=1, bitorder="little")
    data = np.packbits(parts[:, :bits], bitorder="little").tobytes()
    return data + b"\0" * (-len(data) % 4)


def unpack_bits(data: bytes, bits: int, size: int) -> np.ndarray:
    """The first `size` codes; uint8 [size]."""
    parts = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: size * bits]
    return np.packbits(parts.reshape(size, bits), axis=1, bitorder="little").reshape(-1)
