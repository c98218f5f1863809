"""Plots the link speed up to which AdaComp pays, as a function of the model's size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jobs
import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from setups import Setup
from worth_it import METHOD, Forecast, measured_models

from tf_gradcomp.cli.plots import COLOURS, DPI, GREY, WIDTH, label_ends

SIZES = np.geomspace(1e4, 1e9, 101)
SPEEDS = (10, 1e5)
WORKERS = (2, 8, 32)
MEASURED = {"ls": "", "marker": "^", "color": "black", "ms": 7}
PREDICTED = {"ls": "", "marker": "o", "color": "black", "mfc": "white", "ms": 7}


def draw(found: Sequence[Setup], path: Path) -> None:
    """Draws lines of predictions, and a mark for each job."""
    forecast, models = Forecast.of(found), measured_models(found)
    exchange = next(model for model in models if model.job == jobs.EXCHANGE)
    alone = dataclasses.replace(exchange, compute=0.0)
    figure, axis = plt.subplots(figsize=(WIDTH, 0.72 * WIDTH), layout="constrained")
    axis.set(xscale="log", yscale="log", xlim=(SIZES[0], SIZES[-1]), ylim=SPEEDS)
    ends = []
    for colour, workers in zip(COLOURS, WORKERS, strict=False):
        for style, baseline, share in (("-", "float32", 1.0), ("--", "16 bits", 0.5)):
            curve = [
                forecast.break_even(dataclasses.replace(alone, weights=n), workers, share)
                for n in SIZES
            ]
            axis.plot(SIZES, curve, style, color=colour)
            if curve[-1]:
                ends.append((curve[-1], f"{workers} workers, over {baseline}", colour))
    label_ends(axis, ends)
    for model, following in zip(models, [*models[1:], None], strict=True):
        of_two = [s for s in found if (s.job, s.workers) == (model.job, 2) and METHOD in s.records]
        paid = [setup.speed for setup in of_two if setup.seconds(METHOD) < setup.dense]
        if paid:
            axis.plot([model.weights], [max(paid)], **MEASURED)
        even = forecast.break_even(model, 2)
        axis.plot([model.weights], [even], **PREDICTED)
        crowded = following is not None and following.weights < 2 * model.weights
        axis.annotate(
            model.name.partition(",")[0],
            (model.weights, even),
            xytext=(-7 if crowded else 7, -10),
            textcoords="offset points",
            ha="right" if crowded else "left",
            fontsize=9,
        )
    axis.set(
        xlabel="weights of the model",
        ylabel="speed of the link, Mbit/s",
        title="Below its line, a step with AdaComp is faster than a dense step",
    )
    axis.plot([], [], **MEASURED, label="measured: faster on this link, 2 workers")
    axis.plot([], [], **PREDICTED, label="predicted, with the time of computing")
    axis.legend(loc="lower right", fontsize=9)
    axis.grid(alpha=0.3, color=GREY)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
