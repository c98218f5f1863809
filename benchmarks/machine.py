"""What a benchmark says of the machine that it ran on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """How many of which processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()
