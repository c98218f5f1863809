"""Chooses the replica that leads a step of ScaleCom and LGC."""

from __future__ import annotations

_MIXING = 0x9E3779B97F4A7C15


def leader(step: int, size: int) -> int:
    """Each replica once in a run of `size` steps; where the order begins is mixed from the run."""
    mixed = _int64(step // size * _MIXING)
    mixed = _int64((mixed ^ mixed >> 32) * _MIXING)
    return ((mixed >> 33) + step) % size


def _int64(number: int) -> int:
    """Wraps it to 64 bits with a sign."""
    return (number + 2**63) % 2**64 - 2**63
