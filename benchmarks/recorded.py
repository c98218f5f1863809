"""How long kernels took beside `r += g` when it was recorded, by processor."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("kernel_ratios.json")
TOLERANCE = 1.3  # times as long as recorded


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The record of one processor.

    Attributes:
        processor: Which, and the instruction set that the kernels use of it.
        ratios: The least time of each kernel, by label, over that of `r += g`.
    """

    processor: str
    ratios: Mapping[str, float]

    @classmethod
    def read(cls, processor: str, file: Path = FILE) -> Recorded | None:
        """That of a processor, if there is one."""
        of_all = json.loads(file.read_text()) if file.exists() else {}
        return cls(processor, of_all[processor]) if processor in of_all else None

    def write(self, file: Path = FILE) -> None:
        """Puts it in place of that of the same processor."""
        of_all = json.loads(file.read_text()) if file.exists() else {}
        of_all[self.processor] = {label: round(ratio, 2) for label, ratio in self.ratios.items()}
        file.write_text(json.dumps(of_all, indent=2, sort_keys=True) + "\n")


def slower(measured: Mapping[str, float], recorded: Recorded) -> dict[str, str]:
    """A sentence on each kernel that takes longer than recorded, by more than the tolerance."""
    return {
        label: (
            f"{label}: {ratio:.2f} times as long as r += g, and {recorded.ratios[label]:.2f} when "
            f"recorded ({recorded.processor}); expected at most {TOLERANCE} times that. Find what "
            "slows it, or record the new speed: python benchmarks/kernels.py --record"
        )
        for label, ratio in measured.items()
        if ratio > TOLERANCE * recorded.ratios.get(label, ratio)
    }


def not_recorded(measured: Mapping[str, float], recorded: Recorded) -> list[str]:
    """A sentence on each kernel that the record does not know."""
    return [
        f"{label}: not recorded yet, and so not checked: python benchmarks/kernels.py --record"
        for label in measured
        if label not in recorded.ratios
    ]
