"""Measures how long training takes on a slow link to become as good as a finished dense run.

    python benchmarks/time_to_accuracy.py digits --optimizer sgd
    python benchmarks/time_to_accuracy.py text -c adacomp --link "100 Mbit/s" --link "1 Gbit/s"
    python benchmarks/time_to_accuracy.py transformer --workers 4 --seeds 3
    python benchmarks/time_to_accuracy.py digits --local-steps 16 --local-steps 64 --delay 20
    python benchmarks/time_to_accuracy.py digits --seeds 3 --paces EARLIER.json

The runs train the programs of `benchmarks/programs/`. The benchmark measures the speed of each
link, and then times the first steps of a run on it. Workers are behind links that `tc` shapes (see
`network.py`; needs root), and that a relay delays with `--delay`. The quality of a run after
each number of steps is measured once, in whole runs over the loopback, because the quality is the
same on every link. The training time is the number of steps times the seconds per step, without
validation and start-up. Only the first part needs an idle machine. `--paces` takes the times of
steps from an earlier result instead, and trains only the whole runs.

All runs must reach the same figure: the worst final figure of a dense run over the seeds, read as
in convergence.py, or the figure of `--goal`. The Transformer's learning rate falls to zero at the
end of each run. All runs of the Transformer therefore have the same number of epochs, and must come
within 1 % of the dense run's perplexity.

Runs with local steps exchange once in a round of several steps. Epochs are then longer, so that
they are whole rounds, and all runs have proportionally fewer of them. The epochs of all runs are
equally long, because a run that is evaluated more often reaches a figure earlier.
`--local-learning-rate` sets the learning rate of these runs, and `--learning-rate` that of all
runs. The first steps, which are timed, keep the program's own rate.

The result of a free network is a dense run with steps that exchange nothing. These steps are timed
with one process for each worker. All processes train at the same time, each alone with its share of
the batch. If there are more workers than cores, only as many processes train as there are cores.
The time of a step is then multiplied by the number of workers that share a core.

If Horovod is installed, its dense steps are timed, too, which overlap sending with the backward
pass. Methods are compared with the faster of both dense trainings.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import links
from comparison import CURVES, SETTINGS, Comparison, Timed, methods_of, placed_on
from output import processor, show
from placed import measured_links
from records import PACES
from rich.console import Console
from time_to_accuracy_report import DENSE, compare, fixed_goal, markdown, means, plot
from trainings import RESULTS, checked_compressors

from tf_gradcomp.cli.options import results_folder, results_options

RECORDS = "time-to-accuracy"  # folder of records
_EPOCHS = "Epochs of the dense run. [digits: 30; text: 20 of 200 steps; transformer: 10 of 200]"
_PACES = "Take the times of steps from this earlier result or record; any user can do so."
_RATE = "The learning rate of all runs. [default: the program's own]"
_LOCAL_RATE = "The learning rate of runs with --local-steps. [default: that of all runs]"
_LONGER = "Compressed runs have this multiple of the dense run's epochs, except the Transformer's."


@click.command(help=__doc__, context_settings={"show_default": True})
@click.argument("task", type=click.Choice(list(SETTINGS)))
@click.option(
    "-c",
    "--compressor",
    "compressors",
    multiple=True,
    default=["cast", "adacomp", "auto", "power_sgd"],
    callback=checked_compressors,
)
@click.option(
    "--local-steps",
    multiple=True,
    type=click.IntRange(min=2),
    help="Also train with one exchange in this number of steps. Repeat the option to compare.",
)
@click.option(
    "--local-compressor",
    "local_compressors",
    multiple=True,
    default=["no_compression", "top_k(density=0.05, value_bits=2, chunk=128)"],
    callback=checked_compressors,
    help="The compressor of runs with --local-steps.",
)
@click.option("--learning-rate", type=float, help=_RATE)
@click.option("--local-learning-rate", type=float, help=_LOCAL_RATE)
@click.option(
    "--workers",
    default=2,
    type=click.IntRange(min=2),
    help="Each worker has an equal share of the batch.",
)
@click.option("--optimizer", help="adam or sgd; the Transformer has adamw.  [default: the first]")
@click.option(
    "--link",
    "speeds",
    multiple=True,
    default=["100 Mbit/s"],
    type=click.Choice([*links.SPEEDS, links.UNSHAPED]),
)
@click.option(
    "--delay",
    default=0.0,
    type=click.FloatRange(min=0),
    help="The delay of packets on links, in each direction, in milliseconds.",
)
@click.option("--paces", type=click.Path(exists=True, dir_okay=False, path_type=Path), help=_PACES)
@click.option("--seeds", default=1, help="How many: 0, 1, ...")
@click.option("--epochs", type=int, help=_EPOCHS)
@click.option("--longer", default=2.0, help=_LONGER)
@click.option("--goal", type=float, help="Figure to reach. [default: the dense runs' figure]")
@results_options(str(RESULTS))
@click.option("--reuse", is_flag=True, help="Reuse existing runs.")
def main(
    task: str,
    compressors: Sequence[str],
    local_steps: Sequence[int],
    local_compressors: Sequence[str],
    learning_rate: float | None,
    local_learning_rate: float | None,
    workers: int,
    optimizer: str | None,
    speeds: Sequence[str],
    delay: float,
    paces: Path | None,
    seeds: int,
    epochs: int | None,
    longer: float,
    goal: float | None,
    results: Path,
    overwrite: bool,
    reuse: bool,
) -> None:
    setting = SETTINGS[task]
    trained = setting.task
    optimizer = optimizer or trained.optimizers[0]
    if optimizer not in trained.optimizers:
        raise click.UsageError(f"{task} is trained by {' or '.join(trained.optimizers)}.")
    if trained.batch_size % workers:
        raise click.UsageError(f"{workers} workers cannot share {trained.batch_size} rows equally.")
    missing = "" if paces else links.missing(delay / 1000)
    if missing:
        raise click.ClickException(f"{missing} Without, there are no slow links.")
    methods = [(name, 0) for name in compressors]
    methods += itertools.product(local_compressors, local_steps)
    methods.sort(key=lambda method: method[1])
    rates = (learning_rate, local_learning_rate)
    compared = Comparison(setting, workers, optimizer, methods, delay, *rates, reuse)
    tables = [f"{compared.name}.json", f"{compared.name}.md"]
    plots = {link: f"{compared.name}-{links.SPEEDS.get(link, link)}.png" for link in speeds}
    record_files = [] if reuse else _records(compared, [] if paces else speeds, seeds)
    folder = results_folder(results, [*tables, *plots.values(), *record_files], overwrite or reuse)
    records = folder / RECORDS
    timed = _timed_before(compared, speeds, paces) if paces else _timed(compared, speeds, records)
    epochs = epochs or setting.epochs
    longer_epochs = epochs if setting.decays else round(longer * epochs)
    link_paces = itertools.chain(*timed.paces.values())
    other_methods = [method for method in methods_of(link_paces) if method != (DENSE, 0)]
    curves = compared.curves([(DENSE, 0)], seeds, epochs, records)
    curves += compared.curves(other_methods, seeds, longer_epochs, records)
    texts, results_by_link = [], {}
    for link, plot_file in plots.items():
        runs = placed_on(timed.paces[link], curves)
        to_reach = fixed_goal(runs, setting.within) if goal is None else goal
        rows = compare(runs, to_reach)
        results_by_link[link] = {"measured": timed.speeds.get(link), "rows": rows}
        shown = rows if seeds == 1 else [*rows, *means(rows)]
        said = _said(link, timed.speeds.get(link))
        texts.append(f"**{said}**\n\n{markdown(trained.label, shown)}")
        plot(runs, to_reach, link, folder / plot_file)
    text = "\n".join(texts)
    what = {"task": task, "optimizer": optimizer, "workers": workers, "delay": delay}
    what |= {"learning_rate": learning_rate} if learning_rate else {}
    what |= {"local_learning_rate": local_learning_rate} if local_learning_rate else {}
    found = {"about": timed.about, "what": what, "links": results_by_link}
    (folder / tables[0]).write_text(json.dumps(found, indent=1) + "\n")
    (folder / tables[1]).write_text(text)
    show(Console(), text, [folder / file for file in (*tables, *plots.values())])


def _timed(compared: Comparison, speeds: Sequence[str], records: Path) -> Timed:
    """Measures the times of steps on each link."""
    with links.network(compared.workers, compared.delay / 1000) as network:
        measured = {
            link_result["link"]: link_result for link_result in measured_links(network, speeds)
        }
        paces = {link: compared.paces(network, link, records) for link in speeds}
    return Timed(paces, measured, {"machine": processor()})


def _timed_before(compared: Comparison, speeds: Sequence[str], file: Path) -> Timed:
    """Returns the times of steps that a file has."""
    found = {link: compared.recorded(file, link) for link in speeds}
    machines = ", ".join(dict.fromkeys(paces.machine for paces in found.values()))
    return Timed(
        {link: compared.as_recorded(paces) for link, paces in found.items()},
        {link: paces.measured for link, paces in found.items() if paces.measured},
        {"machine": processor(), PACES: {"machine": machines}},
    )


def _said(link: str, measured: Mapping[str, Any] | None) -> str:
    if not measured:
        return f"{link}, as recorded earlier"
    return f"{link}, measured: {measured['Mbit/s']:.1f} Mbit/s, round trip {measured['ms']:.2f} ms"


def _records(compared: Comparison, speeds: Iterable[str], seeds: int) -> list[str]:
    """Returns the files of all runs that are known before "auto" has chosen."""
    dense = compared.timed[0]
    timed = [
        *dense.files_without_exchange,
        dense.file_by_horovod,
        *(f"{run.name}.json" for run in compared.timed),
    ]
    curves = [f"{run.name}.json" for run in compared.runs([(DENSE, 0), *compared.methods], seeds)]
    folders = {**{compared.speed(link): timed for link in speeds}, CURVES: curves}
    return [f"{RECORDS}/{folder}/{file}" for folder, files in folders.items() for file in files]


if __name__ == "__main__":
    main()
