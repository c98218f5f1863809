"""What all benchmarks print: tables, figures, files, and the machine."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

WIDTH = 120  # of tables in a file


def show(console: Console, markdown: str, files: Sequence[Path]) -> None:
    """Shows tables, as Markdown if the output goes to a file, and names all files."""
    if console.is_terminal:
        console.print(Markdown(markdown))
    else:
        print(markdown)
    console.print("Written:", *(os.path.relpath(file) for file in files), soft_wrap=True)


def print_table(table: Table) -> None:
    """Prints a table, as wide as the terminal; in a file, wide enough for all words."""
    console = Console()
    Console(width=None if console.is_terminal else WIDTH).print(table)


def spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Returns the mean, and the standard deviation if there are several values."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.{digits}f}{deviation}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0], "|---" * len(header) + "|", *lines[1:]]


def times(ratio: float) -> str:
    """Returns a ratio with as many decimals as it needs."""
    return f"{ratio:,.0f}" if ratio >= 20 else f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"


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
