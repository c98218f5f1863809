"""Plots of the network benchmark's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import matplotlib

matplotlib.use("Agg")

import network_report
from cells import AUTO
from matplotlib import pyplot as plt
from network_rows import grouped

from tf_gradcomp.cli.plots import COLOURS, DPI, GREY, WIDTH, label_starts

PARTS = ("compute", "encode", "communicate", "decode")


def draw(measured: dict[str, Any], folder: Path) -> list[Path]:
    """Draws the plots for which there is data; returns the files."""
    files = []
    for (job, workers), records in grouped(measured["records"], "job", "workers").items():
        name = f"{job}-{workers}workers"
        parts = {
            link: network_report.split(of_link)
            for (link,), of_link in grouped(records, "link").items()
        }
        if all(parts.values()):
            files.append(folder / f"network-split-{name}.png")
            _split(f"{network_report.TITLES[job]}, {workers} workers", parts, files[-1])
        curves = network_report.speed_ups(measured, job, workers)
        if job == jobs.EXCHANGE:
            curves.pop(jobs.NOTHING, None)  # takes no time at all
        if max(map(len, curves.values())) > 1:
            files.append(folder / f"network-speed-{name}.png")
            _speed(f"{network_report.TITLES[job]}, {workers} workers", curves, files[-1])
    return files


def _split(title: str, parts: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Draws bars with the parts of a step, in a row for each link."""
    parts = {link: {n: p for n, p in some.items() if n != AUTO} for link, some in parts.items()}
    contenders = max(map(len, parts.values()))
    size = (WIDTH, (0.6 + 0.22 * contenders) * len(parts) + 0.6)
    figure, axes = plt.subplots(len(parts), 1, figsize=size, squeeze=False, layout="constrained")
    for axis, (link, of_link) in zip(axes[:, 0], parts.items(), strict=True):
        names, left = list(of_link), [0.0] * len(of_link)
        for i, part in enumerate(PARTS):
            widths = [of_link[name][part] for name in names]
            axis.barh(names, widths, left=left, color=COLOURS[i], label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        # Dense steps take so much longer that they would hide the other bars.
        slowest = max(left[i] for i, name in enumerate(names) if name not in _LONG)
        axis.set_xlim(0, 1.15 * slowest)
        for y, total in enumerate(left):
            x, side = (total, "left") if total <= slowest else (1.15 * slowest, "right")
            axis.text(x, y, f" {total:.0f} ", va="center", ha=side, fontsize="small")
        axis.set(title=link, xlabel="ms of a step")
        axis.invert_yaxis()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS))
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


_LONG = (jobs.ALL_REDUCE, jobs.FLOAT16, "no_compression", "cast")
_STYLES = {jobs.TENSORFLOW_NAME: "-", jobs.HOROVOD_NAME: "-.", jobs.TORCH_NAME: ":"}
_IN_COLOUR = ("adacomp", "scalecom", "cast", jobs.TORCH_POWER_SGD, jobs.NOTHING)  # others are grey
_ROOM = 30  # times slower than the slowest link the axis begins, for labels


def _speed(title: str, curves: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Draws the speed-up as a function of the link's speed."""
    figure, axis = plt.subplots(figsize=(WIDTH, 0.85 * WIDTH), layout="constrained")
    slowest = min(curve[0][0] for curve in curves.values())
    labels = []
    for name, curve in curves.items():
        if name in (*jobs.DENSE.values(), AUTO):
            continue
        style = "--" if name == jobs.NOTHING else _STYLES[jobs.framework(name)]
        shown = name in _IN_COLOUR
        colour = COLOURS[_IN_COLOUR.index(name)] if shown else GREY
        axis.plot(*zip(*curve, strict=True), style, marker="o", ms=4, color=colour, lw=1 + shown)
        labels.append((curve[0][1], name, colour))
    fastest = max(curve[-1][0] for curve in curves.values())
    axis.plot([slowest, fastest], [1, 1], color="black", lw=0.8)
    axis.set(xscale="log", yscale="log", xlabel="speed of the link, Mbit/s, measured")
    axis.set(ylabel="times faster than the dense step of the same framework")
    axis.set_xlim(left=slowest / _ROOM)
    axis.set_title(title)
    axis.grid(alpha=0.3)
    label_starts(axis, labels)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
