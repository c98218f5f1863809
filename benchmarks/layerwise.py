"""Trains by L-GreCo and by uniform settings, with the same steps and seeds, and compares.

    python benchmarks/layerwise.py families digits --seeds 3 --epochs-per-plan 5
    python benchmarks/layerwise.py families text --seeds 1 --epochs 3
    python benchmarks/layerwise.py bins --learners 2 --learners 8
    python benchmarks/layerwise.py periods digits

Learners take turns in one process (`gc.simulation.Learners`), on one thread. The families are
compared at their default setting, at the lower bound of what plans choose from, and with plans;
AdaComp at bins of 50, of 500, and with plans. `periods` tells whether the last steps of a period
give the same plan as all of them.

Ratios are of the payload: of the last epochs, and of the whole run. The time of planning includes
giving the plan to all learners. It is shown as a share of the time of one learner's steps, without
the first plan, which loads its libraries. Both are processor time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read where NumPy is loaded

import click
import numpy as np
import resnet_digits
import tensorflow as tf
from machine import processor
from output import show, spread
from rich.console import Console
from trainings import DIGITS, RESULTS, TEXT, Task

import tf_gradcomp as gc
from tf_gradcomp.cli.options import results_folder, results_options
from tf_gradcomp.compressors.base import GRADIENT_SUM
from tf_gradcomp.compressors.plans import plan_layers, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "keras_examples"))

import char_lstm
import digits_cnn
import transformer_lm

DENSE = "no_compression"
FAMILIES = {"top_k": ("density", 0.01, 0.001), "power_sgd": ("rank", 4, 2), "qsgd": ("bits", 4, 2)}
# As the paper has it, more is sent of a Transformer; its rank 32 would be too much for this width.
OF_TRANSFORMERS = FAMILIES | {"top_k": ("density", 0.1, 0.01), "power_sgd": ("rank", 8, 4)}
UNIFORM, BOUND, PLANNED = "default", "lower bound", "L-GreCo"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A task to train, and the methods to train it with.

    Attributes:
        make: Creates the task from the batch size and a seed.
        reading: How to read the task's quality from the held-out metric.
        batch_size: Batch size of all learners together.
        families: By name of the method: its setting, the default, and the lower bound of a plan.
    """

    make: Callable[[int, int], gc.simulation.Task]
    reading: Task
    batch_size: int
    families: dict[str, tuple[str, float, float]]


WORKLOADS = {
    "digits": Workload(digits_cnn.simulation_task, DIGITS, 64, FAMILIES),
    "digits-sgd": Workload(digits_cnn.simulation_task_sgd, DIGITS, 64, FAMILIES),
    "resnet": Workload(resnet_digits.simulation_task, DIGITS, 64, FAMILIES),
    "text": Workload(char_lstm.simulation_task, TEXT, 32, FAMILIES),
    "transformer": Workload(transformer_lm.simulation_task, TEXT, 32, OF_TRANSFORMERS),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """The settings of one training."""

    workload: str
    learners: int
    method: str
    kind: str
    seed: int


class Training:
    """Learners, the processor's seconds that their steps and plans took, and a row for each epoch.

    Attributes:
        learners: The learners.
        step_seconds: The seconds of each step, summed over all learners.
        plan_seconds: The seconds of each plan.
        epochs: The held-out metric, the mean bytes of a step, and facts about the plan.
    """

    def __init__(self, job: Job) -> None:
        self._workload = WORKLOADS[job.workload]
        self.task = self._workload.make(self._workload.batch_size, job.seed)
        self.learners = gc.simulation.Learners(
            self.task.model, job.learners, job.method, graph=True
        )
        self.step_seconds: list[float] = []
        self.plan_seconds: list[float] = []
        self.epochs: list[dict[str, float]] = []

    def epoch(self, steps: int | None) -> list[gc.simulation.StepReport]:
        """Trains for an epoch, or fewer steps."""
        reports = []
        for x, y in _first(self.task.batches, steps):
            start = time.process_time()
            reports.append(self.learners.train_on_batch(x, y))
            self.step_seconds.append(time.process_time() - start)
        return reports

    def run(self, epochs: int, epochs_per_plan: int, steps: int | None) -> None:
        """Trains, plans and validates."""
        for number in range(1, epochs + 1):
            reports = self.epoch(steps)
            start = time.process_time()
            if number % epochs_per_plan == 0 and self.learners.exchange.plan_settings():
                self.plan_seconds.append(time.process_time() - start)
            data = self.task.validation_data
            data = data if isinstance(data, tuple) else (data,)
            seen = self.task.model.evaluate(*data, verbose=0, return_dict=True)
            plan = self.learners.exchange.hooks.plan_in_force()
            self.epochs.append(
                {
                    "metric": float(seen[self._workload.reading.metric.removeprefix("val_")]),
                    "payload": statistics.mean(report.payload_bytes for report in reports),
                    "sent": statistics.mean(report.sent_bytes for report in reports),
                    "dense": float(reports[0].dense_bytes),
                    "steps": float(len(reports)),
                    "plan_ratio": plan.ratio if plan else 1.0,
                    "budget_used": plan.budget_used if plan else 1.0,
                    "at_bound": plan.at_bound if plan else 0.0,
                }
            )


def _first(batches: Any, steps: int | None) -> Iterator[Any]:
    return iter(batches.take(steps) if steps else batches)


def trained(
    jobs: Sequence[Job], record: Path, console: Console, **settings: Any
) -> list[dict[str, Any]]:
    """Runs the jobs one after another; a record is written after each."""
    _on_one_thread()
    records: list[dict[str, Any]] = []
    for job in jobs:
        training = Training(job)
        training.run(**settings)
        records.append(
            {
                **dataclasses.asdict(job),
                "epochs": training.epochs,
                # The median of the steps, because the first steps trace the graph.
                "step_seconds": statistics.median(training.step_seconds) / job.learners,
                "plan_seconds": training.plan_seconds,
            }
        )
        facts = {"machine": processor(), "settings": settings, "runs": records}
        record.write_text(json.dumps(facts, indent=1) + "\n")
        last = training.epochs[-1]
        console.print(
            f"{job.method}, {job.learners} learners, seed {job.seed}: {last['metric']:.4f}, "
            f"payload ratio {last['dense'] / last['payload']:.1f}"
        )
    return records


def markdown(records: Sequence[dict[str, Any]], reading: Task) -> str:
    """The table: means and standard deviations over the seeds."""
    header = ["method", "learners", "seeds", reading.label, "difference from dense"]
    header += ["payload ratio", "whole run's ratio", "sent, bytes a step", "sent, MB in all"]
    header += ["times fewer bytes than the default: in the end", "in all", "of the plan"]
    header += ["layers at a bound", "planning, % of a learner's steps"]
    rows = [header, ["---"] * len(header)]
    kinds = dict.fromkeys((of_one["method"], of_one["learners"]) for of_one in records)
    for method, learners in kinds:
        rows.append(_cells(_of(records, method, learners), records, reading))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _of(records: Sequence[dict[str, Any]], method: str, learners: int) -> list[dict[str, Any]]:
    return [one for one in records if (one["method"], one["learners"]) == (method, learners)]


def _cells(
    runs: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]], reading: Task
) -> list[str]:
    learners, kind = runs[0]["learners"], runs[0]["kind"]
    dense = _of(records, DENSE, learners)
    quality = [_quality(run, reading) for run in runs]
    above = [
        value - _quality(one, reading) for value, one in zip(quality, dense, strict=len(dense) > 0)
    ]
    family = kind.partition(",")[0]
    own = [one for one in records if one["kind"] == f"{family}, {UNIFORM}"]
    own = [one for one in own if one["learners"] == learners]
    cells = [runs[0]["method"], str(learners), str(len(runs)), spread(quality, reading.digits)]
    cells.append(spread(above, reading.digits, "+") if above else "")
    cells += [f"{_mean(runs, _last_ratio, reading):,.1f}", f"{_mean(runs, _whole_ratio):,.1f}"]
    sent = _mean(runs, lambda run: _total(run, "sent") / _total(run, "one"))
    cells += [f"{sent:,.0f}", f"{_mean(runs, lambda run: _total(run, 'sent')) / 1e6:,.2f}"]
    if not own:
        return [*cells, *[""] * 5]
    times = [_mean(runs, _last_ratio, reading) / _mean(own, _last_ratio, reading)]
    times.append(_mean(runs, _whole_ratio) / _mean(own, _whole_ratio))
    cells += [f"{value:.2f}" for value in times]
    if not kind.endswith(PLANNED):
        return [*cells, *[""] * 3]
    share = _mean(runs, _planning)
    cells.append(f"{_mean(runs, lambda run: run['epochs'][-1]['plan_ratio']):.2f}")
    cells.append(f"{_mean(runs, lambda run: run['epochs'][-1]['at_bound']):.1f}")
    return [*cells, f"{100 * share:.2f}"]


def _mean(runs: Sequence[dict[str, Any]], read: Callable[..., float], *args: Any) -> float:
    return statistics.mean(read(run, *args) for run in runs)


def _quality(run: dict[str, Any], reading: Task) -> float:
    return reading.scale * statistics.mean(one["metric"] for one in run["epochs"][-reading.last :])


def _last_ratio(run: dict[str, Any], reading: Task) -> float:
    return _ratio(run["epochs"][-reading.last :])


def _whole_ratio(run: dict[str, Any]) -> float:
    return _ratio(run["epochs"])


def _ratio(epochs: Sequence[dict[str, float]]) -> float:
    return sum(one["dense"] for one in epochs) / sum(one["payload"] for one in epochs)


def _planning(run: dict[str, Any]) -> float:
    """Returns the time of a plan, divided by the time of a learner's steps in its period."""
    plans = run["plan_seconds"]
    period = _total(run, "one") * run["step_seconds"] / len(plans)
    return statistics.median(plans) / period


def _total(run: dict[str, Any], name: str) -> float:
    return sum(one["steps"] * one.get(name, 1) for one in run["epochs"])


_common = [
    click.option("--seeds", default=3, help="How many: 0, 1, ..."),
    click.option("--epochs", default=20),
    click.option("--epochs-per-plan", default=1),
    click.option("--steps-per-epoch", type=int, help="Fewer than an epoch has."),
    results_options(str(RESULTS)),
]


def _with_common(command: Callable[..., None]) -> Callable[..., None]:
    for option in _common:
        command = option(command)
    return command


@click.group(context_settings={"show_default": True}, help=__doc__)
def main() -> None:
    """Compares L-GreCo with uniform settings."""


def _on_one_thread() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


@main.command()
@click.argument("workload", type=click.Choice(list(WORKLOADS)))
@click.option("-n", "--learners", default=4)
@click.option("--family", "families", multiple=True, default=list(FAMILIES))
@_with_common
def families(workload: str, learners: int, families: Sequence[str], **options: Any) -> None:
    """Each family by its default setting, by the lower bound, and by plans."""
    methods = {DENSE: DENSE}
    for name in families:
        setting, own, bound = WORKLOADS[workload].families[name]
        uniform = f"{name}({setting}={own})"
        methods[f"{name}, {UNIFORM}"] = uniform
        methods[f"{name}, {BOUND}"] = f"{name}({setting}={bound})"
        methods[f"{name}, {PLANNED}"] = f"lgreco(method='{uniform}')"
    _compare(f"layerwise-{workload}", workload, [learners], methods, **options)


@main.command()
@click.option("-n", "--learners", multiple=True, default=[2, 8])
@_with_common
def bins(learners: Sequence[int], **options: Any) -> None:
    """AdaComp with bins of 50, of 500, and by plans; the character LSTM."""
    methods = {
        f"adacomp, {UNIFORM}": "adacomp(bin_sizes=500)",
        f"adacomp, {BOUND}": "adacomp(bin_sizes=50)",
        f"adacomp, {PLANNED}": "lgreco(method='adacomp(bin_sizes=500)')",
    }
    _compare("layerwise-bins", "text", learners, methods, **options)


def _compare(
    name: str,
    workload: str,
    learners: Sequence[int],
    methods: dict[str, str],
    *,
    seeds: int,
    epochs: int,
    epochs_per_plan: int,
    steps_per_epoch: int | None,
    results: Path,
    overwrite: bool,
) -> None:
    files = [f"{name}.{suffix}" for suffix in ("json", "md")]
    folder = results_folder(results, files, overwrite)
    record, text = (folder / file for file in files)
    console = Console()
    jobs = [
        Job(workload, count, method, kind, seed)
        for seed in range(seeds)
        for count in learners
        for kind, method in methods.items()
    ]
    settings = {"epochs": epochs, "epochs_per_plan": epochs_per_plan, "steps": steps_per_epoch}
    records = trained(jobs, record, console, **settings)
    lines = markdown(records, WORKLOADS[workload].reading)
    text.write_text(lines)
    show(console, lines, [record, text])


@main.command()
@click.argument("workload", type=click.Choice(list(WORKLOADS)))
@click.option("-n", "--learners", default=4)
@click.option("--family", "families", multiple=True, default=list(FAMILIES))
@click.option("--last", multiple=True, default=[1, 5, 10], help="Last steps to plan from.")
@click.option("--epochs", default=4)
@click.option("--steps-per-epoch", type=int, help="Fewer than an epoch has.")
def periods(
    workload: str,
    learners: int,
    families: Sequence[str],
    last: Sequence[int],
    epochs: int,
    steps_per_epoch: int | None,
) -> None:
    """Compares plans from the last steps of each epoch with the plan from all of its steps."""
    _on_one_thread()
    header = ["method", "epoch", "steps", "ratio of the plan", "error, relative to the budget"]
    rows = [[*header, "layers with the same setting"], ["---"] * (len(header) + 1)]
    for name in families:
        setting, own, _ = WORKLOADS[workload].families[name]
        method = f"lgreco(method='{name}({setting}={own})')"
        training = Training(Job(workload, learners, method, "", 0))
        for epoch in range(1, epochs + 1):
            whole, tails = sums_of(training, steps_per_epoch, last)
            of_all = _plan(training, whole)
            for count, tail in [(0, whole), *tails.items()]:
                plan = of_all if tail is whole else _plan(training, tail)
                error, same = _compared(training, whole, of_all.settings, plan.settings)
                cells = [name, str(epoch), str(count or "all")]
                cells += [f"{plan.uniform_bytes / plan.bytes:.3f}", f"{error:.3f}", same]
                rows.append(cells)
            training.learners.exchange.plan_settings()
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))


def sums_of(
    training: Training, steps: int | None, last: Sequence[int]
) -> tuple[list[np.ndarray], dict[int, list[np.ndarray]]]:
    """Returns the sum of an epoch's gradients, and the sums over its last steps by their number."""
    sums = training.learners.exchange.replica().state()[GRADIENT_SUM]
    after: list[list[np.ndarray]] = [[total.numpy() for total in sums]]
    for x, y in _first(training.task.batches, steps):
        training.learners.train_on_batch(x, y)
        after = [*after[-max(last) :], [total.numpy() for total in sums]]
    whole = after[-1]
    return whole, {
        count: [total - earlier for total, earlier in zip(whole, after[-1 - count], strict=True)]
        for count in last
    }


def _plan(training: Training, sums: Sequence[np.ndarray]) -> Any:
    lgreco, specs = training.learners.exchange.compressor, training.learners.exchange.specs
    choices = [lgreco.choices(spec) for spec in specs]
    return plan_layers(lgreco.method, specs, sums, choices)


def _compared(
    training: Training, sums: Sequence[np.ndarray], by_all: Sequence[int], settings: Sequence[int]
) -> tuple[float, str]:
    """The error of settings over the budget of some sums; and how many are as by all steps."""
    lgreco, specs = training.learners.exchange.compressor, training.learners.exchange.specs
    own = lgreco.settings(specs)
    places = [place for place, spec in enumerate(specs) if lgreco.choices(spec)]
    missed = allowed = 0.0
    for place in places:
        costs = table(lgreco.method, specs[place], sums[place], [settings[place]], own[place])
        missed += costs.errors[0]
        allowed += costs.errors[costs.default]
    same = sum(by_all[place] == settings[place] for place in places)
    return missed / allowed, f"{same} of {len(places)}"


if __name__ == "__main__":
    main()
