"""Display of the files that a benchmark has written."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
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
