"""Recorded times of kernels relative to two floors, by processor."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

FILE = Path(__file__).with_name("kernel_ratios.json")
TOLERANCE = 2  # times as long as recorded: noise is far below it, and a scalar loop is above it


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The record of one processor.

    Attributes:
        processor: The processor, and the instruction set that the kernels use.
        ratios: The least time of each kernel by label, relative to `r += g` and relative to a
            product of matrices.
    """

    processor: str
    ratios: Mapping[str, Sequence[float]]

    @classmethod
    def read(cls, processor: str, file: Path = FILE) -> Recorded | None:
        """Reads the record of a processor; returns None if there is no record."""
        of_all = json.loads(file.read_text()) if file.exists() else {}
        return cls(processor, of_all[processor]) if processor in of_all else None

    def write(self, file: Path = FILE) -> None:
        """Replaces the record of the same processor."""
        of_all = json.loads(file.read_text()) if file.exists() else {}
        of_all[self.processor] = {
            label: [round(ratio, 2) for ratio in ratios] for label, ratios in self.ratios.items()
        }
        file.write_text(json.dumps(of_all, indent=2, sort_keys=True) + "\n")


def slower(measured: Mapping[str, Sequence[float]], recorded: Recorded) -> dict[str, str]:
    """Yields a sentence on each kernel that is too slow relative to both floors."""
    sentences = {}
    for label, now in measured.items():
        before = recorded.ratios.get(label, now)
        if all(ratio > TOLERANCE * limit for ratio, limit in zip(now, before, strict=True)):
            sentences[label] = (
                f"{label}: {_both(now)}, and {_both(before)} when recorded "
                f"({recorded.processor}); expected at most {TOLERANCE} times one of them. Find "
                "what slows it, or record the new speed: python benchmarks/kernels.py --record"
            )
    return sentences


def _both(ratios: Sequence[float]) -> str:
    addition, product = ratios
    return f"{addition:.2f} times as long as r += g, {product:.2f} as a product of matrices"


def not_recorded(measured: Mapping[str, Sequence[float]], recorded: Recorded) -> list[str]:
    """Yields a sentence on each kernel that has no record."""
    return [
        f"{label}: not recorded yet, so not checked: python benchmarks/kernels.py --record"
        for label in measured
        if label not in recorded.ratios
    ]
