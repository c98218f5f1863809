"""Description of the machine that a benchmark runs on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Returns the number of processors, and their name, family and model.

    Family and model are needed, because hypervisors shorten the name.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    of_all = [line.partition(":") for line in lines]
    facts = {name.strip(): value.strip() for name, _, value in of_all}
    if "model name" not in facts:
        return platform.machine()
    count = sum(name.strip() == "model name" for name, _, _ in of_all)
    numbers = f"family {facts.get('cpu family')}, model {facts.get('model')}"
    return f"{count} x {facts['model name']} ({numbers})"
