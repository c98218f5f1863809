"""The plot of all methods: what a worker sends, and how far it is behind dense training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from methods_table import LEARNERS, METHODS, TASKS, Record, cells

from tf_gradcomp.cli.plots import COLOURS, DPI, GREY, WIDTH

TASK = "digits"
MARKERS = ("o", "s", "^")
MOST = 10.0  # points behind dense at which the axis ends


def draw(records: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draws a row for each method: of numbers of learners with which all methods have trained.

    Args:
        records: Those of each run by its name with seed 0.
        path: The file.
    """
    every = {learners: cells(records, TASK, learners) for learners in LEARNERS}
    found = {n: of_one for n, of_one in every.items() if len(of_one) == len(METHODS)}
    sent = {
        learners: {
            name: cell.sent / TASKS[TASK].steps[learners] / 1e3 for name, cell in of_one.items()
        }
        for learners, of_one in found.items()
    }
    most = {name: value for of_one in sent.values() for name, value in of_one.items()}
    rows = {name: row for row, name in enumerate(sorted(most, key=most.__getitem__))}
    figure, (left, right) = plt.subplots(
        1, 2, sharey=True, figsize=(WIDTH, 0.3 * len(rows) + 1), layout="constrained"
    )
    for learners, colour, marker in zip(found, COLOURS, MARKERS, strict=False):
        style = {"color": colour, "marker": marker, "ls": "", "ms": 6, "mfc": "none"}
        places = [rows[name] for name in found[learners]]
        lags = [min(MOST, cell.behind) for cell in found[learners].values()]
        left.plot([*sent[learners].values()], places, **style, label=f"{learners} workers")
        right.plot(lags, places, **style)
    right.axvspan(-TASKS[TASK].level, TASKS[TASK].level, color=GREY, alpha=0.2, lw=0)
    left.set(xscale="log", xlabel="kB that a worker sends in a step")
    right.set(xlabel=f"points behind dense ({MOST:g}: or more)")
    left.set_yticks(range(len(rows)), rows, fontsize=9)
    left.invert_yaxis()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=len(LEARNERS), fontsize=9)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
