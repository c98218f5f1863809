"""`gradcomp simulate`: trains with many learners in one process, and compares methods."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tf_gradcomp.cli.options import (
    check_plots,
    json_option,
    print_json,
    refuse_earlier_results,
    results_folder,
    results_options,
)
from tf_gradcomp.environment import COMPRESSOR

if TYPE_CHECKING:
    from tf_gradcomp.simulation import Task

_STEPS_WORTH_TRACING = 25  # for each learner
OUTER = {
    "average": None,
    "nesterov": {
        "class_name": "SGD",
        "config": {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True},
    },
}


@dataclasses.dataclass(frozen=True)
class SimulatedTraining:
    """One simulated training."""

    compressor: str
    learners: int
    seed: int
    seconds_per_step: float
    history: dict[str, list[float]]
    settings: dict[str, list[int]]


@click.command(
    context_settings={"show_default": True},
    short_help="Train with many learners in one process, and compare compressors.",
)
@click.argument("program", metavar="FILE.py[:FUNCTION]")
@click.option(
    "-n",
    "--learners",
    multiple=True,
    default=[8],
    type=click.IntRange(min=1),
    help="Number of workers to simulate. Repeat the option to compare several numbers.",
)
@click.option(
    "-c",
    "--compressor",
    multiple=True,
    default=lambda: ["no_compression", os.environ.get(COMPRESSOR) or "adacomp"],
    show_default="no_compression and adacomp, or GRADCOMP_COMPRESSOR in its place",
    metavar="NAME|NAME(KEY=VALUE,...)",
    help="Train with this compressor. Repeat the option to compare several compressors.",
)
@click.option(
    "--precondition",
    default="auto",
    type=click.Choice(["auto", "local", "none"]),
    help="Divide gradients by Adam's second moment before they are compressed, as "
    "CompressedOptimizer(precondition=...) does.",
)
@click.option(
    "--local-steps",
    multiple=True,
    default=[0],
    type=click.IntRange(min=0),
    help="Number of steps that learners take on their own weights between two exchanges, as with "
    "CompressedOptimizer(local_steps=...); 0 exchanges in each step. Repeat the option to compare "
    "several numbers.",
)
@click.option(
    "--outer",
    default="average",
    type=click.Choice(list(OUTER)),
    help="With --local-steps: what updates the common weights. nesterov is SGD(0.7, momentum=0.9, "
    "nesterov=True).",
)
@click.option(
    "--warmup-steps",
    default=0,
    type=click.IntRange(min=0),
    help="With --local-steps: number of first steps that each end with an exchange.",
)
@click.option(
    "--fragments",
    default=1,
    type=click.IntRange(min=1),
    help="With --local-steps: exchange the variables in this many parts, one part at a time.",
)
@click.option(
    "--epochs", default=10, type=click.IntRange(min=1), help="Number of epochs of each training."
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    show_default="the program's own",
    help="Batch size over all learners.",
)
@click.option(
    "--seeds",
    default=1,
    type=click.IntRange(min=1),
    help="Number of trainings with each compressor and number of learners, with seeds 0, 1, ...",
)
@click.option("--plot/--no-plot", default=True, help="Draw a plot, which needs matplotlib.")
@results_options("simulation")
@json_option
def simulate(
    program: str,
    learners: Sequence[int],
    compressor: Sequence[str],
    precondition: str,
    local_steps: Sequence[int],
    outer: str,
    warmup_steps: int,
    fragments: int,
    epochs: int,
    batch_size: int | None,
    seeds: int,
    plot: bool,
    results: Path,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Train with many learners in one process, and compare compressors.

    FILE.py is imported, so its own training must be under if __name__ == "__main__". FUNCTION in
    it, by default simulation_task, takes batch_size and seed and returns a gc.simulation.Task: a
    model, its batches and validation data. The model is trained again for each compressor and
    number of learners. A table, a JSON file and a plot then show the metrics, the bytes that a
    learner would send, and the similarity of the learners. Another plot shows the settings that
    L-GreCo has planned for each layer.
    """
    record, table, picture = (f"simulation.{suffix}" for suffix in ("json", "md", "png"))
    settings_plot = "settings.png"
    files = [record, table, picture, settings_plot]
    refuse_earlier_results(results, files, overwrite)  # before the imports, which take seconds
    if plot:
        check_plots("give --no-plot")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported
    from tf_gradcomp import compressors
    from tf_gradcomp.cli import simulation_report
    from tf_gradcomp.simulation import task

    rounds = [
        _Local(steps, outer, warmup_steps, fragments) if steps else None for steps in local_steps
    ]
    try:
        make_task = task.load(program, batch_size)
        for name in compressor:
            task.checked_method(compressors.get(name))
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from error
    _check_shares(make_task.keywords["batch_size"], learners)
    console = Console(stderr=as_json)
    folder = results_folder(results, files, overwrite)
    runs = []
    with _progress(console) as progress:
        # Repeated values would appear in the table as if they were seeds.
        trainings = itertools.product(learners, compressor, rounds, range(seeds))
        for count, name, local, seed in dict.fromkeys(trainings):
            trained = make_task(seed=seed)
            if not isinstance(trained, task.Task):
                raise click.UsageError(
                    f"{program} returned {type(trained).__name__}; expected a gc.simulation.Task."
                )
            runs.append(_run(trained, name, count, seed, precondition, local, epochs, progress))
            # After each training, because a later one may be interrupted.
            so_far = [dataclasses.asdict(run) for run in runs]
            (folder / record).write_text(json.dumps(so_far, indent=1) + "\n")
    lines = simulation_report.markdown(runs)
    (folder / table).write_text("\n".join(lines) + "\n")
    if plot:
        simulation_report.plot(runs, folder / picture)
        simulation_report.plot_settings(runs, folder / settings_plot)
    if as_json:
        print_json([dataclasses.asdict(run) for run in runs])
    else:
        simulation_report.show(console, runs)
    written = f"{folder}/{record}, .md{' and .png' if plot else ''}"
    if (folder / settings_plot).exists():
        written += f"; {folder}/{settings_plot}"
    console.print(f"Written: {written}", soft_wrap=True)


def _check_shares(batch_size: int, learners: Sequence[int]) -> None:
    for count in learners:
        if batch_size % count:
            raise click.UsageError(
                f"{count} learners cannot share batches of {batch_size}: choose a --batch-size "
                "that is a multiple of each --learners."
            )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
        disable=not console.is_terminal,
    )


class _Local(NamedTuple):
    """Local steps, as the options of the command have them."""

    steps: int
    outer: str
    warmup_steps: int
    fragments: int

    def settings(self) -> dict[str, Any]:
        """Returns a config of `gc.LocalSteps`."""
        return {
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "outer": OUTER[self.outer],
            "fragments": self.fragments,
        }

    def label(self, compressor: str) -> str:
        """Returns the name of a training with these settings."""
        label = f"{compressor}, {self.steps} local steps, {self.outer}"
        return f"{label}, {self.fragments} fragments" if self.fragments > 1 else label


class _Epochs:
    """The batches of each epoch: continues where the last epoch ended, and repeats the data."""

    def __init__(self, batches: Iterable[Any], steps: int) -> None:
        self._batches, self._steps = batches, steps
        self._remaining: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        for step in range(self._steps):
            batch = next(self._remaining, None)
            if batch is None:
                self._remaining = iter(self._batches)
                batch = next(self._remaining, None)
            if batch is None:
                raise click.ClickException(
                    f"The task's batches end after {step} of an epoch's {self._steps} steps, and "
                    "cannot be iterated again: expected a dataset, a list or another iterable "
                    "that can."
                )
            yield batch


def _run(
    task: Task,
    compressor: str,
    learners: int,
    seed: int,
    precondition: str,
    local: _Local | None,
    epochs: int,
    progress: Progress,
) -> SimulatedTraining:
    from tf_gradcomp.compressors.lgreco import LayerPlanner
    from tf_gradcomp.simulation import Learners, StepReport

    method = compressor
    if local:
        compressor = local.label(compressor)
    label = f"{compressor}, {learners} learners, seed {seed}"
    steps = epochs * task.steps_per_epoch
    bar = progress.add_task(label, total=steps, loss="")

    done = itertools.count(1)

    def on_step(report: StepReport) -> None:
        progress.update(bar, advance=1, loss=f"loss {report.loss:.4f}")
        epoch, step = divmod(next(done), task.steps_per_epoch)
        if not step and not progress.console.is_terminal:  # which shows the bar
            line = f"{label}: epoch {epoch} of {epochs}, loss {report.loss:.4f}"
            progress.console.print(line, soft_wrap=True)

    started = time.perf_counter()
    model_precondition = None if precondition == "none" else precondition
    # The cost of tracing grows with the learners, and its savings grow with the steps.
    graph = steps >= _STEPS_WORTH_TRACING * learners
    trained = Learners(
        task.model,
        learners,
        method,
        precondition=model_precondition,
        graph=graph,
        local_steps=local.settings() if local else None,
    )
    batches = _Epochs(task.batches, task.steps_per_epoch)
    history = trained.fit(batches, epochs, task.validation_data, on_step)
    seconds = (time.perf_counter() - started) / steps
    planner = trained.exchange.hooks.get(LayerPlanner)
    settings = planner.settings_over_time(trained.plans) if planner else {}
    return SimulatedTraining(compressor, learners, seed, seconds, history, settings)
