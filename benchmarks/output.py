"""What all benchmarks print and draw: tables, files, the machine, and labels of plots."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

TABLE_WIDTH = 120  # of tables in a file
# Okabe and Ito's colours without yellow, which is too light for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GREY = "#7F7F7F"
PLOT_WIDTH = 7.5  # inches of a plot at the width of a page
DPI = 150
_SIZE = 9  # of a label's font, in points
_TEXT = {
    "xycoords": "axes fraction",
    "fontsize": _SIZE,
    "bbox": {"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 1},
}
Label: TypeAlias = tuple[float, str, str]
"""Where a label is on an axis, its text, and its colour."""


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
    Console(width=None if console.is_terminal else TABLE_WIDTH).print(table)


def spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Returns the mean, and the standard deviation if there are several values."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.{digits}f}{deviation}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0], "|---" * len(header) + "|", *lines[1:]]


def link_name(link: str, delay: float) -> str:
    """Returns a link's name with its delay in milliseconds, if it has any."""
    return f"{link}, {delay:g} ms each way" if delay else link


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
    fields = [line.partition(":") for line in lines]
    facts = {name.strip(): value.strip() for name, _, value in fields}
    if "model name" not in facts:
        return platform.machine()
    count = sum(name.strip() == "model name" for name, _, _ in fields)
    model_numbers = f"family {facts.get('cpu family')}, model {facts.get('model')}"
    return f"{count} x {facts['model name']} ({model_numbers})"


# What is in the names of the machines that docs/benchmarks/README.md lists.
MACHINES = {
    "M2": ("Xeon", "family 6, model 207"),
    "M3": ("EPYC", "family 26, model 2"),
    "M1": ("EPYC",),
}


def machine(name: str) -> str:
    """The name of a machine in the pages, such as M1; its own name if it is none of them."""
    return next((known for known, parts in MACHINES.items() if all(p in name for p in parts)), name)


def label_ends(axis: Any, ends: Sequence[Label]) -> None:
    """Writes labels on the right of a plot, each at the height of its line, without overlaps.

    Args:
        axis: The plot, whose limits are final.
        ends: The labels, each at the last value of its line.
    """
    for y, text, colour in _spaced(axis, ends, 1):
        axis.annotate(text, (1.01, y), color=colour, va="center", **_TEXT)


def label_starts(axis: Any, starts: Sequence[Label]) -> None:
    """Writes labels within a plot, on the left, where no lines may be."""
    for y, text, colour in _spaced(axis, starts, 1):
        axis.annotate(text, (0.01, y), color=colour, va="center", **_TEXT)


def _spaced(axis: Any, labels: Sequence[Label], side: int) -> list[Label]:
    """Returns the labels with places as shares of the axis `side`, as far apart as text needs."""
    axis.get_figure().canvas.draw()  # so that a layout has positions
    to_share = axis.transData + axis.transAxes.inverted()
    corner = [axis.get_xlim()[0], axis.get_ylim()[0]]

    def share(value: float) -> float:
        point = [*corner]
        point[side] = value
        return min(1.0, max(0.0, to_share.transform(point)[side]))

    length = axis.get_window_extent().size[side] / axis.get_figure().dpi
    finite = (label for label in labels if np.isfinite(label[0]))
    order = sorted((share(value), text, colour) for value, text, colour in finite)
    positions = spaced([position for position, _, _ in order], 1.25 * _SIZE / 72 / length)
    return [(y, text, colour) for y, (_, text, colour) in zip(positions, order, strict=True)]


def spaced(places: list[float], gap: float) -> list[float]:
    """Moves ascending places between 0 and 1 apart to a gap, as little as possible."""
    offsets = gap * np.arange(len(places))
    free = np.array(places) - offsets  # places without gaps only need to ascend
    blocks: list[list[float]] = []
    for place in free:  # merges neighbours that do not ascend into their mean
        blocks.append([place, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            other, more = blocks.pop()
            blocks.append([(mean * count + other * more) / (count + more), count + more])
    means, counts = zip(*blocks, strict=True) if blocks else ((), ())
    moved = np.clip(np.repeat(means, np.array(counts, int)), 0, max(0, 1 - gap * (len(places) - 1)))
    return [float(place) for place in moved + offsets]
