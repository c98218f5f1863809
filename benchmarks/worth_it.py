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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import click
import records
import turns
from output import table, times
from setups import CASTS, Cost, Setup, fit, ring_bytes, setups

from tf_gradcomp.advice.cost_model import WORTHWHILE

METHOD = "adacomp"
LABEL = "AdaComp"
NO_GAIN = "no gain"
GOODPUT = 1448 / 1514  # share of TCP's data in Ethernet frames
LINKS = {"10 Mbit/s": 10, "100 Mbit/s": 100, "1 Gbit/s": 1_000, "10 Gbit/s": 10_000}
WORKERS = (2, 4, 8, 32)
FEWER = 40.0  # how many times fewer bytes AdaComp's payload has, if not measured
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
    """The seconds of a model's step: uncompressed, with 16-bit casts, and with AdaComp."""

    dense: float
    cast: float
    sparse: float

    @property
    def best(self) -> str:
        """The method to use; empty if none saves enough."""
        enough = 1 - WORTHWHILE
        if self.sparse <= enough * min(self.dense, self.cast):
            return LABEL
        return "cast" if self.cast <= enough * self.dense else ""

    def over_dense(self) -> str:
        """The recommended method, and its speed-up over uncompressed steps."""
        if not self.best:
            return NO_GAIN
        return f"{self.best} {times(self.dense / self.seconds)}"

    def over_cast(self) -> str:
        """AdaComp's speed-up over 16-bit casts, where it is recommended."""
        return times(self.cast / self.sparse) if self.best == LABEL else NO_GAIN

    @property
    def seconds(self) -> float:
        """Of the recommended method's step."""
        return {LABEL: self.sparse, "cast": self.cast}.get(self.best, self.dense)


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


Cell: TypeAlias = Callable[[Steps], str]


def cells(
    model: Model, found: Sequence[Setup], forecast: Forecast, workers: int, text: Cell
) -> dict[str, str]:
    """A cell for each link, in bold if measured."""
    there = {s.link: s for s in found if (s.job, s.workers) == (model.job, workers)}
    return {
        link: f"**{text(_measured(there[link]))}**"
        if link in there
        else text(forecast.steps(model, workers, speed))
        for link, speed in LINKS.items()
    }


def _measured(setup: Setup) -> Steps:
    cast = min(setup.seconds(name) for name in CASTS if name in setup.records)
    return Steps(setup.dense, cast, setup.seconds(METHOD))


def models_table(found: Sequence[Setup]) -> list[str]:
    """The lines of a table of the models."""
    models = measured_models(found)
    return table(
        ("model", "million weights", "computing a step, ms", "times fewer bytes sent, 2 workers"),
        (
            [m.name, f"{m.weights / 1e6:.3g}", f"{1e3 * m.compute:.0f}", f"{m.fewer:.0f}"]
            for m in [*models, *larger(models)]
        ),
    )


def speed_ups(found: Sequence[Setup], text: Cell, numbers: Sequence[int]) -> Iterator[str]:
    """Yields the lines of a table for each number of workers."""
    forecast, models = Forecast.of(found), measured_models(found)
    for workers in numbers:
        yield from ("", f"**{workers} workers**", "")
        rows = (
            [model.name, *cells(model, found, forecast, workers, text).values()]
            for model in [*models, *larger(models)]
        )
        yield from table(("model", *LINKS), rows)


SMALL_LINKS = ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s")


def small_table(found: Sequence[Setup], trained: Model, by_link: Mapping[str, Steps]) -> list[str]:
    """The lines of the README's table: two workers.

    Args:
        found: The measured steps.
        trained: A model that is shown first.
        by_link: The measured steps of this model.
    """
    forecast, models = Forecast.of(found), measured_models(found)
    shown = [model for model in models if model.job in (turns.RESNET, turns.MLP)]
    predicted = cells(trained, found, forecast, 2, Steps.over_dense)
    measured = {link: f"**{steps.over_dense()}**" for link, steps in by_link.items()}
    rows = [_row(trained, {**predicted, **measured})]
    for model in [*shown, *larger(models)]:
        rows.append(_row(model, cells(model, found, forecast, 2, Steps.over_dense)))
    return table(("your model, 2 workers", *SMALL_LINKS), rows)


def _row(model: Model, by_link: Mapping[str, str]) -> list[str]:
    name, _, seconds = model.name.partition(", if a step takes ")
    name += f" of {seconds} a step" if seconds else ""
    millions = model.weights / 1e6
    name += f", {millions:.0f}" if millions > 9 else f", {millions:.1f}"
    ratios = (by_link[link].replace(f"{LABEL} ", "") for link in SMALL_LINKS)
    return [f"{name} million weights", *ratios]


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--weights", required=True, type=float, help="Of your model.")
@click.option("--compute", required=True, type=float, help="Seconds of a step on a single worker.")
@click.option("--fewer", default=FEWER, help="Times fewer bytes in AdaComp's payload.")
def main(weights: float, compute: float, fewer: float) -> None:
    found = setups(records.read_network())
    forecast = Forecast.of(found)
    model = Model("yours", weights, compute, fewer)
    lines = table(
        ("workers", *LINKS),
        (
            [
                str(workers),
                *(forecast.steps(model, workers, speed).over_dense() for speed in LINKS.values()),
            ]
            for workers in WORKERS
        ),
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
