"""The header in front of every payload, as docs/payload_format.md describes it."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np

MAGIC = b"TFGC"
VERSION = 2
NON_FINITE = 1
HEADER = struct.Struct("<4sHHqqqIIqQ")  # the checksum is the last field

_MASK = 2**64 - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_ROTATION = 31


@dataclasses.dataclass(frozen=True)
class Header:
    """The fields of the fixed header, apart from length and checksum."""

    method: int
    fingerprint: int
    step: int
    num_tensors: int
    plan: int  # `plan_of` the settings of tensors
    flags: int = 0


def plan_of(settings: Sequence[int] = ()) -> int:
    """A digest of the main setting of each tensor; of none, for a method without such a setting."""
    digest = _checksum(np.array(settings, "<i8").tobytes(), b"")
    return digest - 2**64 if digest >= 2**63 else digest


def write(header: Header, body: bytes = b"") -> np.ndarray:
    """Puts the header in front of a body of whole words; int32 [words]."""
    length = (HEADER.size + len(body)) // 4
    fields = (
        MAGIC,
        VERSION,
        header.method,
        header.fingerprint,
        header.plan,
        header.step,
        header.flags,
        header.num_tensors,
        length,
    )
    checksum = _checksum(body, HEADER.pack(*fields, 0)[:-8])
    return np.frombuffer(HEADER.pack(*fields, checksum) + body, "<i4")


def read(payload: np.ndarray) -> tuple[Header, bytes]:
    """Takes a payload apart, and raises ValueError if it is not one."""
    data = np.ascontiguousarray(payload, "<i4").tobytes()
    magic, version, method, fingerprint, plan, step, flags, num_tensors, length, checksum = (
        HEADER.unpack_from(data)
    )
    if (magic, version, 4 * length) != (MAGIC, VERSION, len(data)):
        raise ValueError("not one payload of this version")
    if checksum != _checksum(data[HEADER.size :], data[: HEADER.size - 8]):
        raise ValueError("wrong checksum")
    return Header(method, fingerprint, step, num_tensors, plan, flags), data[HEADER.size :]


def _checksum(body: bytes, header: bytes) -> int:
    lanes = [1, 2, 3, 4]
    body += b"\0" * (-len(body) % 8)
    for i, word in enumerate(np.frombuffer(body + header, "<u8").tolist()):
        lanes[i % 4] = _mix(lanes[i % 4], word)
    total = 0
    for lane in lanes:
        total = _mix(total, lane)
    return total


def _mix(value: int, word: int) -> int:
    mixed = value ^ word
    rotated = (mixed << _ROTATION | mixed >> (64 - _ROTATION)) & _MASK
    return rotated * _MULTIPLIER & _MASK
