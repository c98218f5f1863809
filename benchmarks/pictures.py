"""Draws the pictures of the README and the documentation from the recorded results.

    python benchmarks/pictures.py
    python benchmarks/pictures.py docs/step_time.png benchmarks/worth-it.png
    python benchmarks/pictures.py --curves results/convergence

With `--curves`, the runs that `convergence.py digits` has left in a folder become the recorded
curves. The other benchmarks draw their own results by the functions of this module.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import matplotlib
import numpy as np
import records
import turns
from output import COLOURS, GREY, label_ends, label_starts, times

matplotlib.use("Agg")

from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
DENSE, CAST, ADACOMP, FREE = "no_compression", "cast", "adacomp", "free network"
SHOWN = (DENSE, CAST, ADACOMP)
NAMES = {DENSE: "uncompressed", CAST: "16 bits", ADACOMP: "AdaComp", FREE: "free network"}
BLUE, RED, ORANGE = "#0072B2", "#D55E00", "#E69F00"  # of Okabe and Ito, as are all COLOURS
COLOUR_OF = {DENSE: RED, CAST: ORANGE, ADACOMP: BLUE}
PALE = "#BFBFBF"
WIDTH = 8.0  # inches: 800 pixels on a page
DPI = 150
STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.titlesize": 13,
    "figure.titleweight": "bold",
    "figure.facecolor": "white",  # also in dark mode
}
LINKS = ("100 Mbit/s", "1 Gbit/s")
STEP_MODEL = ("transformer", 2)  # the task, and the number of workers
STEP_TITLE = "Transformer of 0.43 million weights, 2 workers"
DEMO_SEED = 0
SEVERAL, ALIKE = 5, 0.1  # last epochs, and the difference of their mean losses that is noise
DIGITS = "Digits network of 0.15 million weights, 2 workers, Adam"
TO_REACH = 98.0  # per cent of accuracy, which uncompressed training has at the end
TEXT = "shakespeare-2layers-{}learners-{}-batch16-rate2-800steps-seed0"
TEXT_LEARNERS = 8

Record = records.Record


def new_figure(
    title: str,
    subtitle: str = "",
    columns: int = 1,
    rows: int = 1,
    height: float = 4.0,
    **axes: Any,
) -> tuple[Any, Any]:
    """Returns a figure with a title of the finding, and its axes."""
    plt.rcParams.update(STYLE)
    figure, made = plt.subplots(
        rows, columns, figsize=(WIDTH, height), layout="constrained", **axes
    )
    figure.suptitle(title, x=0.01, ha="left")
    if subtitle:
        first = made if rows * columns == 1 else np.ravel(made)[0]
        first.set_title(subtitle, fontsize=10.5, fontweight="normal", color="#444444")
    return figure, made


def save(figure: Any, path: Path) -> None:
    """Writes the picture, with the same bytes for the same data."""
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    plt.close(figure)


def rounded(factor: float) -> str:
    """Returns a factor as `times` does, without a zero behind the point."""
    return times(factor).removesuffix(".0")


# The README, and how it works


def step_time(path: Path) -> None:
    """The time of a step, computing and waiting for the exchange, on two links."""
    task, workers = STEP_MODEL
    by_link = {
        setup["link"]: {row["method"]: row["seconds of a step"] for row in setup["rows"]}
        for setup in records.read_network()["setups"]
        if (setup["task"], setup["workers"]) == (task, workers)
    }
    gains = [by_link[link][DENSE] / by_link[link][ADACOMP] for link in LINKS]
    title = "With AdaComp a training step hardly waits for the network"
    figure, axes = new_figure(title, rows=2, height=4.3, sharex=True)
    for axis, link, gain in zip(axes, LINKS, gains, strict=True):
        seconds = by_link[link]
        computing = seconds[FREE]
        for row, method in enumerate(SHOWN):
            waiting = max(0.0, seconds[method] - computing)
            axis.barh(row, computing, color=PALE)
            axis.barh(row, waiting, left=computing, color=COLOUR_OF[method])
            more = f", {rounded(gain)} times faster" if method == ADACOMP else ""
            text = f" {seconds[method]:.3f} s{more}"
            axis.text(seconds[method], row, text, va="center", fontweight="bold")
        axis.set_yticks(range(len(SHOWN)), [NAMES[method] for method in SHOWN])
        axis.tick_params(left=False)
        axis.invert_yaxis()
        axis.set_title(f"Link of {link}")
    slow = by_link[LINKS[0]]
    inside = {"va": "center", "ha": "center", "fontsize": 10}
    axes[0].text(slow[FREE] / 2, 0, "compute", **inside)
    axes[0].text(
        (slow[FREE] + slow[DENSE]) / 2, 0, "wait for the exchange", **inside, color="white"
    )
    axes[1].set(xlabel=f"seconds of a step ({STEP_TITLE}, measured)", xlim=(0, 0.27))
    save(figure, path)


def what_is_sent(path: Path) -> None:
    """Two workers and what goes over the link between them in a step."""
    runs = {method: _demo(method) for method in (DENSE, ADACOMP)}
    sent = {method: statistics.mean(run["sent_bytes"]) for method, run in runs.items()}
    factor = sent[DENSE] / sent[ADACOMP]
    title = f"With AdaComp, a worker sends {times(factor)} times fewer bytes in a step"
    figure, axis = new_figure(title, f"{DIGITS}", height=3.1)
    axis.set(xlim=(0, 100), ylim=(0, 36))
    axis.axis("off")
    gradient = 4 * runs[DENSE]["weights"] / 1e3
    middle = {"ha": "center", "va": "center"}
    for x, worker in ((0, "worker 0"), (72, "worker 1")):
        axis.add_patch(
            matplotlib.patches.FancyBboxPatch(
                (x + 1, 1), 26, 34, boxstyle="round,pad=0,rounding_size=2", fc="#F2F2F2", ec=GREY
            )
        )
        axis.text(x + 14, 31, worker, fontweight="bold", **middle)
        axis.text(x + 14, 22.5, f"gradient of a step:\n{gradient:.0f} kB", fontsize=10, **middle)
        kept = "sends its large entries;\nkeeps the rest, and adds\nit to the next gradient"
        axis.text(x + 14, 8.5, kept, fontsize=9.5, color=BLUE, **middle)
    thickest = 5.0  # of the arrow for all bytes
    for y, method in ((22.5, DENSE), (8.5, ADACOMP)):
        colour, half = COLOUR_OF[method], thickest * sent[method] / sent[DENSE] / 2
        head = max(1.2, 1.7 * half)
        corners = [(29, y), (32, y + head), (32, y + half), (68, y + half), (68, y + head), (71, y)]
        corners += [(x, 2 * y - corner) for x, corner in reversed(corners[1:-1])]
        axis.add_patch(matplotlib.patches.Polygon(corners, fc=colour, ec="none"))
        label = f"{NAMES[method]}: {sent[method] / 1e3:.{0 if method == DENSE else 1}f} kB each way"
        axis.text(50, y + head + 1.2, label, ha="center", color=colour, fontweight="bold")
    save(figure, path)


def demo(path: Path) -> None:
    """The recorded run of the demonstration."""
    loss_over_bytes({method: _demo(method) for method in (DENSE, ADACOMP)}, DIGITS, path)


def loss_over_bytes(runs: Mapping[str, Record], what: str, path: Path) -> None:
    """Draws the test loss of an uncompressed and a compressed run over the bytes that were sent.

    Args:
        runs: `val_loss`, the `sent_bytes` of a step by epoch, and `steps_per_epoch`, by method.
        what: What was trained.
        path: The file.
    """
    sent = {
        method: np.cumsum(run["sent_bytes"]) * run["steps_per_epoch"] / 1e6
        for method, run in runs.items()
    }
    dense, other = runs
    factor = sent[dense][-1] / sent[other][-1]
    steps = len(runs[dense]["val_loss"]) * runs[dense]["steps_per_epoch"]
    ends_at = [statistics.mean(run["val_loss"][-SEVERAL:]) for run in runs.values()]
    alike = abs(ends_at[1] / ends_at[0] - 1) < ALIKE
    title = f"{'The same test' if alike else 'Test'} loss after {times(factor)} times fewer bytes"
    figure, axis = new_figure(title, f"{what}, {steps} steps", height=4.2)
    for method, run in runs.items():
        colour = COLOUR_OF.get(method, BLUE)
        axis.plot(sent[method], run["val_loss"], color=colour, lw=2)
        x, y = sent[method][-1], run["val_loss"][-1]
        axis.plot([x], [y], "o", color=colour)
        name = NAMES.get(method, method)
        label = f"{name}\n{x:,.0f} MB"
        axis.annotate(
            label, (x, y), (0, 12), textcoords="offset points", color=colour, fontweight="bold"
        )
    y = min(run["val_loss"][-1] for run in runs.values()) * 0.8
    ends = (sent[other][-1], sent[dense][-1])
    axis.annotate("", (ends[0], y), (ends[1], y), arrowprops={"arrowstyle": "->", "lw": 1.5})
    middle = float(np.sqrt(ends[0] * ends[1]))
    axis.text(middle, y * 0.93, f"{times(factor)} times fewer bytes", ha="center", va="top")
    axis.set(xscale="log", yscale="log", xlabel="MB that each worker has sent", ylabel="test loss")
    axis.set(ylim=(y * 0.75, None), xlim=(None, ends[1] * 3))
    plain_ticks(axis.xaxis)
    plain_ticks(axis.yaxis)
    axis.grid(alpha=0.3)
    save(figure, path)


def plain_ticks(axis: Any) -> None:
    """Labels a logarithmic axis by numbers such as 0.1 and 100 instead of powers."""
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def curves_of(method: str) -> list[Record]:
    """Returns the recorded runs of the digits network with a method, by their seeds."""
    found = [run for run in records.read(records.CURVES) if run["compressor"] == method]
    return sorted(found, key=lambda run: run["seed"])


def _demo(method: str) -> Record:
    return next(run for run in curves_of(method) if run["seed"] == DEMO_SEED)


# Accuracy


def convergence_digits(path: Path) -> None:
    """Accuracy over steps and over bytes, with the default settings."""
    runs = {method: curves_of(method) for method in (DENSE, ADACOMP)}
    factor = _sent(runs[DENSE]) / _sent(runs[ADACOMP])
    lines = {
        method: (
            np.arange(1, len(found[0]["sent_bytes"]) + 1) * found[0]["steps_per_epoch"],
            np.mean([np.cumsum(run["sent_bytes"]) for run in found], 0)
            * found[0]["steps_per_epoch"],
            100 * np.array([run["val_accuracy"] for run in found]),
        )
        for method, found in runs.items()
    }
    fewer = f"about {round(factor, -1):.0f} times fewer bytes"
    title = f"AdaComp is as accurate after each step, with {fewer}"
    subtitle = f"{DIGITS}; mean and range of {len(runs[DENSE])} seeds"
    over_steps_and_bytes(lines, "test accuracy, %", title, subtitle, path, lowest=80)


def convergence_text(path: Path) -> None:
    """Bits per character over steps and over bytes, with the default settings."""
    found = records.by_name(records.EVIDENCE)
    dense = found[TEXT.format(1, DENSE)]
    compressed = found[TEXT.format(TEXT_LEARNERS, ADACOMP)]
    ring = 2 * (TEXT_LEARNERS - 1) / TEXT_LEARNERS * dense["dense_bytes"]
    lines = {
        method: (np.array(run["step"]), np.array(run["step"]) * sent, np.array([run["curve"]]))
        for method, run, sent in (
            (DENSE, dense, ring),
            (ADACOMP, compressed, compressed["sent_bytes"]),
        )
    }
    factor = ring / compressed["sent_bytes"]
    title = f"Text: not worse after any number of steps, with {times(factor)} times fewer bytes"
    subtitle = f"LSTM of two layers, Shakespeare, {TEXT_LEARNERS} simulated workers, Adam, one seed"
    over_steps_and_bytes(lines, "held-out bits per character", title, subtitle, path)


def _sent(runs: Sequence[Record]) -> float:
    return statistics.mean(statistics.mean(run["sent_bytes"]) for run in runs)


def over_steps_and_bytes(
    lines: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    label: str,
    title: str,
    subtitle: str,
    path: Path,
    lowest: float | None = None,
) -> None:
    """Draws a metric over steps and over bytes.

    Args:
        lines: For each method, the steps, the bytes sent until then, and the metric [seeds, steps].
        label: Name of the metric, with its unit.
        title: The finding.
        subtitle: What was trained.
        path: The file.
        lowest: Where the axis of the metric begins.
    """
    figure, (left, right) = new_figure(title, subtitle, columns=2, height=4.0, sharey=True)
    for method, (steps, sent, metric) in lines.items():
        colour, name = COLOUR_OF.get(method, BLUE), NAMES.get(method, method)
        for axis, x in ((left, steps), (right, sent / 1e6)):
            marker = "o" if len(x) < 10 else ""
            axis.plot(x, metric.mean(0), color=colour, lw=2, marker=marker, label=name)
            axis.fill_between(x, metric.min(0), metric.max(0), color=colour, alpha=0.15, lw=0)
    left.set(xlabel="steps", ylabel=label, ylim=(lowest, None))
    right.set(xlabel="MB that each worker has sent", xscale="log")
    plain_ticks(right.xaxis)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    save(figure, path)


def methods(path: Path) -> None:
    """The recorded runs of all methods."""
    import evidence  # imports TensorFlow

    methods_of(evidence.recorded(records.EVIDENCE), path)


def methods_of(found: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draws what methods send and how far behind they are, of numbers of workers with all methods.

    Args:
        found: The records of each run, by its name with seed 0.
        path: The file.
    """
    import methods_table as of

    by_workers = {}
    for workers in of.LEARNERS:
        cells = of.cells(found, of.PLOTTED, workers)
        if len(cells) == len(of.METHODS):
            steps = of.TASKS[of.PLOTTED].steps[workers]
            by_workers[workers] = {
                name: (cell.sent / steps / 1e3, cell.behind) for name, cell in cells.items()
            }
    draw_methods(by_workers, of.TASKS[of.PLOTTED].level, of.MOST_BEHIND, path)


def draw_methods(
    found: Mapping[int, Mapping[str, tuple[float, float]]], level: float, most: float, path: Path
) -> None:
    """Draws a row for each method: what it sends, and how far it is behind, by number of workers.

    Args:
        found: For each number of workers and method, the kB of a step and the points behind.
        level: How many points behind are level.
        most: The most points that are drawn; a method that is further behind is drawn there.
        path: The file.
    """
    sent = {name: values[0] for by_method in found.values() for name, values in by_method.items()}
    rows = {name: row for row, name in enumerate(sorted(sent, key=sent.__getitem__))}
    title = "With 32 workers, few methods stay level with uncompressed training"
    figure, (left, right) = new_figure(
        title, "sent", columns=2, height=0.3 * len(rows) + 1.7, sharey=True
    )
    for (workers, by_method), colour, marker in zip(found.items(), COLOURS, "os^", strict=False):
        style = {"color": colour, "marker": marker, "ls": "", "ms": 7, "mfc": "none", "mew": 1.5}
        places = [rows[name] for name in by_method]
        left.plot([kb for kb, _ in by_method.values()], places, **style, label=f"{workers} workers")
        right.plot([min(most, behind) for _, behind in by_method.values()], places, **style)
    right.axvspan(-level, level, color=GREY, alpha=0.2, lw=0, label="level with uncompressed")
    right.set_title("accuracy", fontsize=10.5, fontweight="normal", color="#444444")
    left.set(xscale="log", xlabel="kB that a worker sends in a step")
    right.set(xlabel=f"points behind ({most:g}: or more)")
    left.set_yticks(range(len(rows)), rows, fontsize=10)
    left.invert_yaxis()
    plain_ticks(left.xaxis)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    handles = [*left.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


OVER_WORKERS = (DENSE, CAST, ADACOMP, "top_k", "arc_top_k", "scalecom")


def bytes_over_workers(path: Path) -> None:
    """What a worker sends in a step of the digits network, with 2 to 32 workers."""
    by_setup = {
        (run["compressor"], run["learners"]): run
        for run in records.read(records.EVIDENCE)
        if (run.get("task"), run["seed"], run.get("optimizer")) == ("digits", 0, "adam")
    }
    counts = (2, 8, 32)
    title = "The more workers, the less AdaComp saves: it gathers the workers' payloads"
    figure, axis = new_figure(title, "Digits network, whole runs of simulated workers", height=4.6)
    ends = []
    for method, colour in zip(OVER_WORKERS, (RED, ORANGE, BLUE, *COLOURS[2:5]), strict=True):
        if method == DENSE:
            size = by_setup[DENSE, 1]["dense_bytes"] / 1e3
            sent = [2 * (n - 1) / n * size for n in counts]
        else:
            sent = [by_setup[method, n]["sent_bytes"] / 1e3 for n in counts]
        axis.plot(counts, sent, "o-", color=colour, lw=2)
        ends.append((sent[-1], f"{NAMES.get(method, method)}: {sent[-1]:,.0f} kB", colour))
    axis.set(xscale="log", yscale="log", xlabel="workers")
    axis.set(ylabel="kB that a worker sends in a step")
    axis.set_xticks(counts, counts)
    axis.minorticks_off()
    plain_ticks(axis.yaxis)
    axis.grid(alpha=0.3)
    label_ends(axis, ends)
    save(figure, path)


# Speed


def time_to_accuracy(path: Path) -> None:
    """Accuracy over seconds at 100 Mbit/s: recorded curves, and recorded times of steps."""
    (seconds,) = (
        {row["method"]: row["seconds of a step"] for row in setup["rows"]}
        for setup in records.read_network()["setups"]
        if (setup["task"], setup["workers"], setup["link"]) == ("digits", 2, LINKS[0])
    )
    lines = {}
    for method in SHOWN:
        runs = curves_of(method)
        steps = np.arange(1, len(runs[0]["val_accuracy"]) + 1) * runs[0]["steps_per_epoch"]
        lines[method] = (
            steps * seconds[method],
            100 * np.array([run["val_accuracy"] for run in runs]),
        )
    what = f"{DIGITS}; link of {LINKS[0]}; mean of {len(lines[DENSE][1])} seeds"
    metric_over_seconds(lines, TO_REACH, "test accuracy, %", what, path, lowest=80)


def metric_over_seconds(
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]],
    goal: float,
    label: str,
    what: str,
    path: Path,
    lowest: float | None = None,
    *,
    rises: bool = True,
) -> None:
    """Draws the mean of a metric over seconds of training.

    Args:
        lines: For each method, the seconds, and the metric [seeds, seconds].
        goal: The figure to reach, the same for all methods.
        label: Name of the metric, with its unit.
        what: What was trained.
        path: The file.
        lowest: Where the axis of the metric begins.
        rises: Whether a higher metric is better.
    """
    means = {method: (x, metric.mean(0)) for method, (x, metric) in lines.items()}
    reached = {}
    for method, (x, mean) in means.items():
        there = mean >= goal if rises else mean <= goal
        reached[method] = float(x[there.argmax()]) if there.any() else None
    title = "How long training takes"
    if reached.get(DENSE) and reached.get(ADACOMP):
        title = (
            f"AdaComp is as accurate after {reached[ADACOMP]:.1f} s as uncompressed training "
            f"after {reached[DENSE]:.0f} s"
        )
    figure, axis = new_figure(title, what, height=4.4)
    axis.axhline(goal, color="black", lw=1)
    end = max(x[-1] for x, _ in means.values())
    where = {"ha": "right", "va": "bottom", "fontsize": 10}
    where = {"ha": "right", "va": "bottom", "fontsize": 10}
    unit = " %" if label.endswith("%") else ""
    axis.text(1.3 * end, goal, f"to reach: {goal:.4g}{unit}", **where)
    for index, (method, (x, mean)) in enumerate(means.items()):
        colour = COLOUR_OF.get(method, COLOURS[(index + 2) % len(COLOURS)])
        axis.plot(x, mean, color=colour, lw=2)
        seconds = reached[method]
        said = "never there" if seconds is None else f"{seconds:.1f} s"
        at = (x[-1], mean[-1]) if seconds is None else (seconds, goal)
        axis.plot(*at, "o", color=colour)
        height = (0.75 - 0.17 * index) if rises else (0.4 + 0.17 * index)
        axis.annotate(
            f"{NAMES.get(method, method)}: {said}",
            at,
            (at[0] + 0.1 * end, height),
            textcoords=axis.get_xaxis_transform(),
            color=colour,
            fontweight="bold",
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour},
        )
    axis.set(xlabel="seconds of training", ylabel=label, ylim=(lowest, None), xlim=(0, 1.3 * end))
    axis.grid(alpha=0.3)
    save(figure, path)


def worth_it(path: Path) -> None:
    """Up to which link AdaComp pays, over the size of the model."""
    import worth_it as prediction  # imports TensorFlow
    from setups import setups

    found = setups(records.read_network())
    forecast, models = prediction.Forecast.of(found), prediction.measured_models(found)
    sizes, workers = np.geomspace(1e4, 1e9, 101), 2
    (exchange,) = (model for model in models if model.job == turns.EXCHANGE)
    only = dataclasses.replace(exchange, compute=0.0)
    curve = [forecast.break_even(dataclasses.replace(only, weights=n), workers) for n in sizes]
    title = "The larger the model, the faster the link on which AdaComp pays"
    what = "2 workers; a cautious prediction: the uncompressed step overlaps perfectly"
    figure, axis = new_figure(title, what, height=5.2)
    axis.set(xscale="log", yscale="log", xlim=(sizes[0] / 1e6, sizes[-1] / 1e6), ylim=(10, 1e5))
    axis.fill_between(sizes / 1e6, 10, curve, color=BLUE, alpha=0.15, lw=0)
    axis.plot(sizes / 1e6, curve, color=BLUE, lw=2, label="the limit if computing took no time")
    axis.text(30, 25, "AdaComp is faster", color=BLUE, fontweight="bold", fontsize=13)
    axis.text(0.013, 3.3e4, "uncompressed is faster", color="#444444", fontsize=13)
    for speed, name in ((100, "100 Mbit/s"), (1e3, "1 Gbit/s"), (1e4, "10 Gbit/s")):
        axis.axhline(speed, color=GREY, lw=1, ls="--")
        axis.text(900, speed * 1.06, name, ha="right", va="bottom", fontsize=10, color="#444444")
    label = "the limit of a model, with its time of computing"
    for model in [*models, *prediction.larger(models)]:
        if model.job == turns.EXCHANGE:  # the same follows, with the time of computing
            continue
        at = (model.weights / 1e6, forecast.break_even(model, workers))
        axis.plot(*at, "o", color="black", ms=7, label=label)
        name = model.name.replace(", if a step takes ", ",\n").replace(" s", " s a step")
        side = -1 if model.name.startswith("ResNet") else 1
        axis.annotate(
            name,
            at,
            (8 * side, 0),
            textcoords="offset points",
            va="center",
            ha="left" if side > 0 else "right",
            fontsize=10,
        )
        label = None
    axis.set(xlabel="million weights of the model", ylabel="speed of the link, Mbit/s")
    axis.legend(loc="upper right", fontsize=10, frameon=False)
    plain_ticks(axis.xaxis)
    plain_ticks(axis.yaxis)
    save(figure, path)


# Of a run of network.py

PARTS = {"compute": PALE, "encode": ORANGE, "communicate": RED, "decode": BLUE}
_BREAK = 3  # times as long as the next bar is a bar that is cut


def split(title: str, parts: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Draws bars with the parts of a step, in a panel for each link; long bars have a break."""
    contenders = max(map(len, parts.values()))
    height = (0.7 + 0.23 * contenders) * len(parts) + 1.0
    finding = f"{title}: where the time of a step goes"
    figure, axes = new_figure(finding, rows=len(parts), height=height, squeeze=False)
    for axis, (link, of_link) in zip(axes[:, 0], parts.items(), strict=True):
        order = sorted(of_link, key=lambda name: sum(of_link[name].values()))
        totals = [sum(of_link[name].values()) for name in order]
        jumps = [i for i in range(3, len(totals)) if totals[i] > _BREAK * totals[i - 1]]
        end = 1.5 * totals[jumps[-1] - 1] if jumps else totals[-1]
        for row, (name, total) in enumerate(zip(order, totals, strict=True)):
            left = 0.0
            for part, width in of_link[name].items():
                colour = PARTS.get(part, RED)
                axis.barh(row, min(width, end - left), left=left, color=colour, label=part)
                left = min(end, left + width)
            axis.text(min(total, end), row, f" {total:,.0f} ms", va="center", fontsize=10)
            if total > end:
                for shift in (0.93, 0.945):
                    axis.plot(
                        [shift * end - 0.004 * end, shift * end + 0.004 * end],
                        [row + 0.5, row - 0.5], color="white", lw=2.5,
                    )  # fmt: skip
        axis.set_yticks(range(len(order)), order, fontsize=10)
        axis.set_title(link)
        axis.set_xlim(0, 1.12 * end)
        axis.invert_yaxis()
    axes[-1, 0].set_xlabel("milliseconds of a step; bars with a break are longer")
    by_label = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
    figure.legend(
        by_label.values(), by_label, loc="outside lower center", ncols=len(by_label), frameon=False
    )
    save(figure, path)


_STYLES = {turns.TENSORFLOW_NAME: "-", turns.HOROVOD_NAME: "-.", turns.TORCH_NAME: ":"}
# The others are grey.
_IN_COLOUR = (ADACOMP, "scalecom", CAST, turns.TORCH_POWER_SGD, turns.NOTHING)
_ROOM = 40  # times slower than the slowest link the axis begins, for labels


def speed(title: str, curves: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> None:
    """Draws the speed-up of each contender over the speed of the link.

    Args:
        title: What was measured.
        curves: For each contender, pairs of Mbit/s and speed-up, the slowest link first.
        path: The file.
    """
    finding = "The slower the link, the more compression gains"
    figure, axis = new_figure(finding, title, height=6.5)
    slowest = min(curve[0][0] for curve in curves.values())
    fastest = max(curve[-1][0] for curve in curves.values())
    labels = []
    for name, curve in curves.items():
        if name in (*turns.DENSE.values(), turns.AUTO):
            continue
        style = "--" if name == turns.NOTHING else _STYLES[turns.framework(name)]
        shown = name in _IN_COLOUR
        colour = COLOURS[_IN_COLOUR.index(name)] if shown else GREY
        axis.plot(*zip(*curve, strict=True), style, marker="o", ms=4, color=colour, lw=1 + shown)
        labels.append((curve[0][1], name, colour))
    axis.plot([slowest, fastest], [1, 1], color="black", lw=0.8)
    axis.set(xscale="log", yscale="log", xlabel="measured speed of the link, Mbit/s")
    axis.set(ylabel="times faster than the uncompressed step of the same framework")
    axis.set_xlim(left=slowest / _ROOM)
    axis.set_xticks([tick for tick in axis.get_xticks() if slowest / 2 < tick < 2 * fastest])
    axis.minorticks_off()
    plain_ticks(axis.xaxis)
    plain_ticks(axis.yaxis)
    axis.grid(alpha=0.3)
    label_starts(axis, labels)
    save(figure, path)


def network(job: str, kind: str) -> Callable[[Path], None]:
    """Returns what draws a picture of the recorded steps of a job with two workers."""

    def drawn(path: Path) -> None:
        import network_report  # imports TensorFlow

        measured = records.read_network()
        title, parts, curves = network_report.drawable(measured, job, 2)
        split(title, parts, path) if kind == "split" else speed(title, curves, path)

    return drawn


PICTURES: dict[str, Callable[[Path], None]] = {
    "docs/step_time.png": step_time,
    "docs/what_is_sent.png": what_is_sent,
    "docs/demo.png": demo,
    "docs/benchmarks/methods.png": methods,
    "benchmarks/convergence-digits.png": convergence_digits,
    "benchmarks/convergence-text.png": convergence_text,
    "benchmarks/bytes-over-learners.png": bytes_over_workers,
    "benchmarks/time-to-accuracy-digits-adam-2workers-100mbit.png": time_to_accuracy,
    "benchmarks/worth-it.png": worth_it,
    **{
        f"benchmarks/network-{kind}-{job}-2workers.png": network(job, kind)
        for job in (turns.EXCHANGE, turns.MLP)
        for kind in ("split", "speed")
    },
}
OF_LINKS = [name for name in PICTURES if "step_time" in name or "network" in name] + [
    "benchmarks/time-to-accuracy-digits-adam-2workers-100mbit.png",
    "benchmarks/worth-it.png",
]
_KEPT = ("compressor", "weights", "steps_per_epoch")
_SERIES = ("val_accuracy", "val_loss", "sent_bytes")


def take_curves(folder: Path) -> None:
    """Records the runs of `convergence.py digits` with two workers."""
    found = []
    for method in SHOWN:
        for file in sorted(folder.glob(f"digits-2workers-adam-{method}-seed*.json")):
            run = json.loads(file.read_text())
            series = {name: run["history"][name] for name in _SERIES}
            seed = int(file.stem.rpartition("seed")[2])
            facts = {key: run[key] for key in _KEPT} | {"arguments": run["arguments"]}
            found.append(records.rounded({**facts, "seed": seed, **series}))
    records.write(records.CURVES, found)


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(list(PICTURES)), metavar="[PICTURE]...")
@click.option("--curves", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(names: tuple[str, ...], curves: Path | None) -> None:
    if curves:
        take_curves(curves)
    for name in names or PICTURES:
        PICTURES[name](ROOT / name)
        print(name)


if __name__ == "__main__":
    main()
