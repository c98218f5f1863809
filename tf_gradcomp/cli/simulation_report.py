"""The table and the plot that compare simulated trainings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tf_gradcomp.cli.simulate import SimulatedTraining

_LAST_EPOCHS = 5
_COLUMNS = {  # by name in the history: title and format
    "payload_bytes": ("payload, bytes", ",.0f"),
    "sent_bytes": ("sent, bytes", ",.0f"),
    "compression_ratio": ("payload ratio", ",.1f"),
    "fewer_bytes": ("times fewer sent", ",.1f"),
    "union_density": ("union density", ".4f"),
    "residual_norm": ("residual norm", ".3g"),
    "cosine_distance": ("cosine distance", ".3f"),
    "hamming_distance": ("Hamming distance", ".3f"),
}


def markdown(runs: Sequence[SimulatedTraining]) -> list[str]:
    """The table, as lines of Markdown: means over the seeds and the last epochs."""
    metrics = _metrics(runs)
    header = ["method", "learners", *metrics, *(title for title, _ in _COLUMNS.values())]
    header += ["whole run's ratio", "ms per step and learner"]
    rows = [header, ["---"] * len(header)]
    for (compressor, learners), same in _by_kind(runs).items():
        cells = [compressor, str(learners)]
        cells += [_mean_and_deviation(same, metric) for metric in metrics]
        cells += [f"{_mean(same, name):{form}}" for name, (_, form) in _COLUMNS.items()]
        cells.append(f"{statistics.mean(_whole_ratio(run) for run in same):,.1f}")
        rows.append([*cells, f"{_milliseconds(same):.1f}"])
    return ["| " + " | ".join(row) + " |" for row in rows]


def show(console: Console, runs: Sequence[SimulatedTraining]) -> None:
    """Prints the columns of the table that matter most, and the verdict."""
    metrics = list(dict.fromkeys([*_metrics(runs)[:1], *_quality(runs)[:1]]))
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("method", overflow="fold")
    for title in ("workers", *metrics, "sent, bytes", "times\nfewer"):
        table.add_column(title, justify="right", no_wrap=True)
    for (compressor, learners), same in _by_kind(runs).items():
        cells = [_mean_and_deviation(same, metric) for metric in metrics]
        cells += [f"{_mean(same, 'sent_bytes'):,.0f}", f"{_fewer_sent(same):,.1f}"]
        table.add_row(compressor, str(learners), *cells)
    console.print(table)
    for line in verdict(runs):
        console.print(line, highlight=False)


def verdict(runs: Sequence[SimulatedTraining]) -> list[str]:
    """Returns each method's distance from uncompressed training, and the bytes that it saves."""
    kinds = _by_kind(runs)
    dense = {n: same for (name, n), same in kinds.items() if _is_dense(name)}
    quality = _quality(runs)
    if not quality:
        return ["No verdict: the task gave no data to validate on."]
    if not dense:
        return ["No verdict: it needs uncompressed training to compare with: -c no_compression."]
    compared = [
        f"{name} with {n} worker{'s' * (n > 1)}: {_compared(same, dense[n], quality[0])}."
        for (name, n), same in kinds.items()
        if not _is_dense(name) and n in dense and n > 1
    ]
    epochs = min(_LAST_EPOCHS, *(len(run.history[quality[0]]) for run in runs))
    which = f"mean of the last {epochs} epochs" if epochs > 1 else "after the last epoch"
    lines = [f"By {quality[0]}, {which}:", *compared]
    if compared and any(len(same) == 1 for same in dense.values()):
        lines.append("Several seeds show how much of this is noise: --seeds 3.")
    return lines if compared else []


def _compared(
    same: Sequence[SimulatedTraining], dense: Sequence[SimulatedTraining], metric: str
) -> str:
    """The sentence that compares a method with dense training of the same number of learners."""
    fewer = f" at {_fewer(dense, same)} bytes"
    dense_results = [_last(run, metric) for run in dense]
    behind = _mean(dense, metric) - _mean(same, metric)
    if not _more_is_better(metric, dense):
        behind = -behind
    if math.isnan(behind):
        return f"{metric} is not a number"
    spread = max(dense_results) - min(dense_results)
    if abs(behind) <= spread and len(dense) > 1:
        return f"within the spread of uncompressed training{fewer}"
    is_share = "acc" in metric
    amount = f"{100 * abs(behind):.1f} points" if is_share else f"{abs(behind):.3g}"
    undecided = ", not decided (one seed)" if len(dense) == 1 or len(same) == 1 else ""
    return f"{amount} {'behind' if behind > 0 else 'ahead of'} uncompressed{fewer}{undecided}"


def _fewer(dense: Sequence[SimulatedTraining], same: Sequence[SimulatedTraining]) -> str:
    times = _mean(dense, "sent_bytes") / _mean(same, "sent_bytes")
    if times < 1:
        return f"{1 / times:.1f} times as many"
    return f"{times:.0f} times fewer" if times >= 10 else f"{times:.1f} times fewer"


def _more_is_better(metric: str, dense: Sequence[SimulatedTraining]) -> bool:
    """Whether larger is better, by the metric's name or its course in dense training."""
    if any(part in metric for part in ("acc", "auc", "precision", "recall")):
        return True
    if any(part in metric for part in ("loss", "error", "mae", "mse")):
        return False
    return all(run.history[metric][-1] > run.history[metric][0] for run in dense)


def _is_dense(compressor: str) -> bool:
    return compressor.partition("(")[0].strip().lower() == "no_compression"


def _quality(runs: Sequence[SimulatedTraining]) -> list[str]:
    """The validation metrics; the loss comes after the user's metrics."""
    return sorted(_metrics(runs), key=lambda name: name == "val_loss")


def plot(runs: Sequence[SimulatedTraining], path: Path) -> None:
    """Draws quality over epochs, and bytes and similarity over the number of learners."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    metric = (_metrics(runs) or ["loss"])[-1]
    learners = sorted({run.learners for run in runs})
    methods = list(dict.fromkeys(run.compressor for run in runs))
    with plt.style.context("tableau-colorblind10"):
        rows = 3 if len(learners) > 1 else 2
        figure, axes = plt.subplots(rows, 1, figsize=(7.5, 3.4 * rows), layout="constrained")
        for index, method in enumerate(methods):
            style = ("-", "--", ":", "-.")[index // 10 % 4]  # ten methods have ten colours
            same_method = {n: same for (name, n), same in _by_kind(runs).items() if name == method}
            curves = zip(*(run.history[metric] for run in same_method[learners[-1]]), strict=True)
            means = [statistics.mean(values) for values in curves]
            axes[0].plot(range(1, len(means) + 1), means, style, marker=".", label=method)
            if len(learners) == 1:
                axes[1].barh(method, _mean(same_method[learners[0]], "sent_bytes"))
                continue
            for axis, name in zip(axes[1:], ("sent_bytes", "cosine_distance"), strict=True):
                values = [_mean(same, name) for same in same_method.values()]
                axis.plot(list(same_method), values, style, marker="o")
    axes[0].set(xlabel="epoch", ylabel=metric, title=f"{learners[-1]} workers")
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    sent = "bytes that a worker sends in a step"
    if len(learners) == 1:
        axes[1].set(xlabel=sent, xscale="log")
        axes[1].invert_yaxis()
    else:
        axes[1].set(xlabel="workers", ylabel=sent, yscale="log")
        axes[2].set(xlabel="workers", ylabel="cosine distance of residuals")
        for axis in axes[1:]:
            axis.set_xscale("log", base=2)
            axis.set_xticks(learners, [str(n) for n in learners])
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_settings(runs: Sequence[SimulatedTraining], path: Path) -> None:
    """Draws the planned settings over layers and epochs, of one run of each method with plans.

    Colours are multiples of a layer's own setting, on a logarithmic scale; black means that a layer
    is sent whole. Without any plans, there is no plot.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    planned = {run.compressor: run for run in reversed(runs) if run.settings}
    if not planned:
        return
    layers = max(len(run.settings) for run in planned.values())
    figure, axes = plt.subplots(
        1,
        len(planned),
        figsize=(7 * len(planned), 1.5 + 0.25 * layers),
        layout="constrained",
        squeeze=False,
    )
    for axis, (compressor, run) in zip(axes[0], reversed(planned.items()), strict=True):
        settings = np.array(list(run.settings.values()), np.float64)
        times = np.where(settings > 0, settings, np.nan) / settings[:, :1]
        limit = max(2.0, np.nanmax(np.abs(np.log2(times)), initial=0))
        colours = plt.get_cmap("coolwarm").with_extremes(bad="black")
        image = axis.imshow(np.log2(times), colours, aspect="auto", vmin=-limit, vmax=limit)
        axis.set(xlabel="plans so far", title=f"{compressor}, {run.learners} learners")
        axis.set_yticks(range(len(run.settings)), list(run.settings), fontsize="small")
        axis.xaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, label="log2 of setting / own setting")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _metrics(runs: Sequence[SimulatedTraining]) -> list[str]:
    return [name for name in runs[0].history if name.startswith("val_")]


def _by_kind(runs: Sequence[SimulatedTraining]) -> dict[tuple[str, int], list[SimulatedTraining]]:
    kinds: dict[tuple[str, int], list[SimulatedTraining]] = {}
    for run in runs:
        kinds.setdefault((run.compressor, run.learners), []).append(run)
    return kinds


def _whole_ratio(run: SimulatedTraining) -> float:
    payload = sum(run.history["payload_bytes"])
    return sum(run.history["dense_bytes"]) / payload if payload else float("nan")


def _mean(same: Sequence[SimulatedTraining], name: str) -> float:
    return statistics.mean(_last(run, name) for run in same)


def _mean_and_deviation(same: Sequence[SimulatedTraining], name: str) -> str:
    values = [_last(run, name) for run in same]
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def _fewer_sent(same: Sequence[SimulatedTraining]) -> float:
    """Returns how many times fewer bytes were sent than a dense all-reduce would send."""
    histories = [run.history for run in same]
    sent = [np.asarray(history["sent_bytes"][-_LAST_EPOCHS:]) for history in histories]
    ratios = [np.asarray(history["fewer_bytes"][-_LAST_EPOCHS:]) for history in histories]
    dense = sum(float(np.sum(s * r)) for s, r in zip(sent, ratios, strict=True))
    total = sum(float(np.sum(s)) for s in sent)
    return dense / total if total else math.nan


def _milliseconds(same: Sequence[SimulatedTraining]) -> float:
    """Milliseconds of a step, for each learner."""
    return 1000 * statistics.mean(run.seconds_per_step / run.learners for run in same)


def _last(run: SimulatedTraining, name: str) -> float:
    return statistics.mean(run.history[name][-_LAST_EPOCHS:])
