"""Shows for which models, links and numbers of workers compression pays, and how much.

    python benchmarks/worth_it.py --weights 66e6 --compute 0.3 --fewer 100

Predicts the steps of your own model from the recorded results of `network.py`. To measure in your
own job, use `gradcomp advise`. `publish.py` makes a page of the recorded models.

Only methods that train like dense count: 16-bit casts and AdaComp. Where a step was measured, it is
compared with the best measured dense step. A predicted step of AdaComp is compared with ideal dense
steps and casts, which use the link fully, overlap with computing as far as possible, and cost no
time themselves.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click
import matplotlib
import numpy as np
import records
import turns

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from output import COLOURS, DPI, GREY, PLOT_WIDTH, label_ends, table, times
from setups import CASTS, Cost, Setup, fit, ring_bytes, setups

from tf_gradcomp.advice.cost_model import WORTHWHILE

METHOD = "adacomp"
LABEL = "AdaComp"
GOODPUT = 1448 / 1514  # share of TCP's data in Ethernet frames
LINKS = {"10 Mbit/s": 10, "100 Mbit/s": 100, "1 Gbit/s": 1_000, "10 Gbit/s": 10_000}
WORKERS = (2, 4, 8, 32)
SIZES = np.geomspace(1e4, 1e9, 101)
PLOTTED_SPEEDS = (10, 1e5)
PLOTTED_WORKERS = (2, 8, 32)
MEASURED = {"ls": "", "marker": "^", "color": "black", "ms": 7}
PREDICTED = {"ls": "", "marker": "o", "color": "black", "mfc": "white", "ms": 7}
NAMES = {
    turns.RESNET: "ResNet-20",
    turns.LSTM: "character LSTM",
    turns.MLP: "MLP",
    turns.EXCHANGE: "ResNet-50, exchange alone",
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model whose steps are predicted.

    Attributes:
        name: Its name in tables.
        weights: Number of weights.
        compute: Seconds of a step that exchanges nothing.
        fewer: The ratio of the gradient's size to the size of AdaComp's payload.
        job: The job with which the model was measured; None if it was not.
    """

    name: str
    weights: float
    compute: float
    fewer: float
    job: str | None = None


@dataclasses.dataclass(frozen=True)
class Steps:
    """The seconds of a model's step: dense, with 16-bit casts, and with AdaComp."""

    dense: float
    cast: float
    sparse: float

    def verdict(self) -> str:
        """The recommended method, and its speed-ups over dense steps and casts."""
        enough = 1 - WORTHWHILE
        if self.sparse <= enough * min(self.dense, self.cast):
            return f"{LABEL} {times(self.dense / self.sparse)} ({times(self.cast / self.sparse)})"
        if self.cast <= enough * self.dense:
            return f"16 bits {times(self.dense / self.cast)}"
        return "no"


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Predicts steps from AdaComp's cost."""

    cost: Cost

    @classmethod
    def of(cls, found: Sequence[Setup]) -> Forecast:
        """Fits AdaComp's cost to the measured setups with two workers."""
        cost = fit(METHOD, [setup for setup in found if setup.workers == 2])
        if cost is None:
            raise click.ClickException(f"{records.NETWORK} has fewer than two steps of {METHOD}.")
        return cls(cost)

    def steps(self, model: Model, workers: int, speed: float) -> Steps:
        """Predicts a model's steps on a link with a speed in Mbit/s, of which TCP gets a share."""
        per_byte = 8 / (1e6 * GOODPUT * speed)
        dense = ring_bytes(workers, 4 * model.weights) * per_byte
        sparse = model.compute + self.own(model, workers) + _sent(model, workers) * per_byte
        return Steps(max(model.compute, dense), max(model.compute, dense / 2), sparse)

    def own(self, model: Model, workers: int) -> float:
        """Returns the seconds of latency, encoding and decoding, if each worker has one core.

        The prediction is pessimistic: all of the time grows with the number of payloads.
        """
        return self.cost.latency + self.cost.each * model.weights * workers / 2

    def break_even(self, model: Model, workers: int, baseline_share: float = 1.0) -> float:
        """Returns the Mbit/s up to which AdaComp is faster; 0 if it is never faster.

        Args:
            model: The model.
            workers: Number of workers.
            baseline_share: Bytes of the baseline, relative to dense float32.
        """
        dense = baseline_share * ring_bytes(workers, 4 * model.weights)
        saved = 8e-6 * (dense - _sent(model, workers)) / GOODPUT
        return max(0.0, saved / (model.compute + self.own(model, workers)))


def _sent(model: Model, workers: int) -> float:
    """Returns the bytes that a worker sends with AdaComp, whose payloads are gathered."""
    return (workers - 1) * 4 * model.weights / model.fewer


def measured_models(found: Sequence[Setup]) -> list[Model]:
    """Returns the models of the jobs, ordered by their number of weights."""
    models = []
    for job in dict.fromkeys(setup.job for setup in found):
        two_worker_setups = [
            s for s in found if s.job == job and s.workers == 2 and METHOD in s.records
        ]
        if not two_worker_setups:
            continue
        sent = statistics.mean(s.records[METHOD]["counted_bytes"] for s in two_worker_setups)
        weights = two_worker_setups[0].weights
        compute = statistics.median(s.compute for s in two_worker_setups)
        models.append(Model(NAMES[job], weights, compute, 4 * weights / sent, job))
    return sorted(models, key=lambda model: model.weights)


def larger(models: Sequence[Model]) -> list[Model]:
    """Returns models that were not measured, with a ResNet-50's compression ratio."""
    (exchange,) = (model for model in models if model.job == turns.EXCHANGE)
    resnet = dataclasses.replace(exchange, name="ResNet-50, if a step takes 0.2 s", compute=0.2)
    bert_base = Model("BERT-base, if a step takes 0.5 s", 110e6, 0.5, exchange.fewer)
    return [dataclasses.replace(resnet, job=None), bert_base]


def cells(
    model: Model, found: Sequence[Setup], forecast: Forecast, workers: int, on: Iterable[str]
) -> Iterator[str]:
    """Yields a cell for each link, in bold if measured."""
    there = {s.link: s for s in found if (s.job, s.workers) == (model.job, workers)}
    for link in on:
        if link in there:
            yield f"**{_measured(there[link]).verdict()}**"
        else:
            yield forecast.steps(model, workers, LINKS[link]).verdict()


def _measured(setup: Setup) -> Steps:
    cast = min(setup.seconds(name) for name in CASTS if name in setup.records)
    return Steps(setup.dense, cast, setup.seconds(METHOD))


def full_tables(found: Sequence[Setup]) -> Iterator[str]:
    """Yields the lines of a table for each number of workers."""
    forecast = Forecast.of(found)
    models = measured_models(found)
    for workers in WORKERS:
        yield from ("", f"**{workers} workers**", "")
        yield from _table([*models, *larger(models)], found, forecast, workers)


def _table(
    models: Sequence[Model], found: Sequence[Setup], forecast: Forecast, workers: int
) -> list[str]:
    header = ("model", "million weights", "computing, ms", "times fewer bytes", *LINKS)
    return table(
        header,
        (
            [
                model.name,
                f"{model.weights / 1e6:.3g}",
                f"{1e3 * model.compute:.0f}",
                f"{model.fewer:.0f}",
                *cells(model, found, forecast, workers, LINKS),
            ]
            for model in models
        ),
    )


SMALL = {2: ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s"), 8: ("100 Mbit/s", "1 Gbit/s")}


def small_table(found: Sequence[Setup]) -> list[str]:
    """The lines of the README's table."""
    forecast = Forecast.of(found)
    models = measured_models(found)
    header = [f"{n} workers, {link}" for n, links in SMALL.items() for link in links]
    return table(
        ("model", "million weights", *header),
        (
            [
                model.name,
                f"{model.weights / 1e6:.3g}",
                *(
                    cell
                    for workers, on in SMALL.items()
                    for cell in cells(model, found, forecast, workers, on)
                ),
            ]
            for model in [*models, *larger(models)]
        ),
    )


def draw(found: Sequence[Setup], path: Path) -> None:
    """Draws lines of predictions, and a mark for each job."""
    forecast, models = Forecast.of(found), measured_models(found)
    exchange = next(model for model in models if model.job == turns.EXCHANGE)
    exchange_only = dataclasses.replace(exchange, compute=0.0)
    figure, axis = plt.subplots(figsize=(PLOT_WIDTH, 0.72 * PLOT_WIDTH), layout="constrained")
    axis.set(xscale="log", yscale="log", xlim=(SIZES[0], SIZES[-1]), ylim=PLOTTED_SPEEDS)
    ends = []
    for colour, workers in zip(COLOURS, PLOTTED_WORKERS, strict=False):
        for style, baseline, share in (("-", "float32", 1.0), ("--", "16 bits", 0.5)):
            curve = [
                forecast.break_even(dataclasses.replace(exchange_only, weights=n), workers, share)
                for n in SIZES
            ]
            axis.plot(SIZES, curve, style, color=colour)
            if curve[-1]:
                ends.append((curve[-1], f"{workers} workers, over {baseline}", colour))
    label_ends(axis, ends)
    for model, following in zip(models, [*models[1:], None], strict=True):
        two_worker_setups = [
            s for s in found if (s.job, s.workers) == (model.job, 2) and METHOD in s.records
        ]
        paid = [setup.speed for setup in two_worker_setups if setup.seconds(METHOD) < setup.dense]
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


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--weights", required=True, type=float, help="Of your model.")
@click.option("--compute", required=True, type=float, help="Seconds of a step on a single worker.")
@click.option("--fewer", default=40.0, help="Times fewer bytes in AdaComp's payload.")
def main(weights: float, compute: float, fewer: float) -> None:
    found = setups(records.read_network())
    forecast = Forecast.of(found)
    model = Model("yours", weights, compute, fewer)
    lines = table(
        ("workers", *LINKS),
        (
            [
                str(workers),
                *(forecast.steps(model, workers, speed).verdict() for speed in LINKS.values()),
            ]
            for workers in WORKERS
        ),
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
