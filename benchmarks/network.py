"""Measures exchanges and whole steps of training on links of known speed.

    python benchmarks/network.py --short
    python benchmarks/network.py --torch-python ../torch/bin/python
    python benchmarks/network.py --job mlp --workers 4 --link "100 Mbit/s" --delay 20

Each worker has a separate network namespace, behind a link that `tc` shapes and a relay can
delay. This needs root; other users measure on the loopback. Contenders take turns in the same
processes; Horovod's and PyTorch's follow in theirs. All is measured once for each setting of
malloc. `results/default` and `results/tuned` get the figures as JSON, the tables as Markdown, and
the plots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click
import links
import network_report
import tensorflow as tf
import turns
from links import LOOPBACK, SPEEDS, UNSHAPED
from output import link_name, processor, show
from placed import SETTINGS, malloc_option, measured_links, placed_job, shared_out_threads
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from turns import Plan

from tf_gradcomp import compressors
from tf_gradcomp.cli.options import results_folder, results_options
from tf_gradcomp.compressors.auto import CANDIDATES

HERE = Path(__file__).resolve().parent
FILES = ("network.json", "network.md")  # and the plots of what was measured


# Without plans, L-GreCo is another of these; and LGC begins with hundreds of dense steps.
_LEFT_OUT = (compressors.LGreCo.name, compressors.LGC.name)
METHODS = [*(name for name in compressors.names() if name not in _LEFT_OUT), turns.ALTERNATING]
EVERYONE = (turns.ALL_REDUCE, turns.FLOAT16, *METHODS, turns.NOTHING)
SOME = (
    *(
        turns.ALL_REDUCE,
        turns.FLOAT16,
        *CANDIDATES,
        "scalecom",
        "power_sgd",
        turns.AUTO,
        turns.NOTHING,
    ),
    *turns.HOROVOD,
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A job on some number of workers, on some links, by some contenders."""

    job: str
    workers: int
    links: Sequence[str]
    contenders: Sequence[str]

    @property
    def by_framework(self) -> dict[str, list[str]]:
        """The contenders that each framework runs, where it runs any."""
        of = {name: turns.framework(name) for name in self.contenders}
        return {
            framework: [n for n in of if of[n] == framework]
            for framework in turns.DENSE
            if framework in of.values()
        }


_OTHERS = (*turns.HOROVOD, *turns.TORCH)
_ALL_LINKS = (*SPEEDS, UNSHAPED)
_FAST = ("100 Mbit/s", "1 Gbit/s", UNSHAPED)  # at 10 Mbit/s, a large dense step takes minutes
FULL = (
    Cell(turns.EXCHANGE, 2, _FAST, (*EVERYONE, *_OTHERS)),
    Cell(turns.MLP, 2, _ALL_LINKS, (*EVERYONE, turns.GOSSIP, *_OTHERS)),
    Cell(turns.LSTM, 2, _ALL_LINKS, SOME),
    Cell(turns.RESNET, 2, _ALL_LINKS, SOME),
    Cell(turns.EXCHANGE, 4, _FAST, (*EVERYONE, *_OTHERS)),
    Cell(turns.MLP, 4, _FAST, (*EVERYONE, turns.GOSSIP, *_OTHERS)),
    Cell(turns.LSTM, 4, _FAST, SOME),
    Cell(turns.RESNET, 4, _FAST, SOME),
)
SHORT = (
    Cell(
        turns.EXCHANGE,
        2,
        ("100 Mbit/s", UNSHAPED),
        (
            turns.ALL_REDUCE,
            "adacomp",
            "scalecom",
            turns.AUTO,
            turns.NOTHING,
        ),  # dense takes 10 s a step
    ),
    Cell(
        turns.MLP,
        2,
        ("100 Mbit/s", UNSHAPED),
        (turns.ALL_REDUCE, *CANDIDATES, "scalecom", turns.AUTO, turns.NOTHING, *_OTHERS),
    ),
)


def chosen(
    cells: Sequence[Cell],
    *,
    only_jobs: Collection[str] = (),
    only_workers: Collection[int] = (),
    only_links: Collection[str] = (),
    only_contenders: Collection[str] = (),
    frameworks: Collection[str] = tuple(turns.DENSE),
    shaped: bool = True,
) -> list[Cell]:
    """Returns the requested parts of the cells that can be measured here."""

    def keep(cell: Cell) -> Cell:
        links = [link for link in cell.links if not only_links or link in only_links]
        there = [name for name in cell.contenders if turns.framework(name) in frameworks]
        names = [name for name in there if not only_contenders or name in only_contenders]
        dense = [turns.DENSE[turns.framework(name)] for name in names]  # all are compared with it
        names = [name for name in there if name in {*names, *dense}]
        return Cell(cell.job, cell.workers, links if shaped else [LOOPBACK], names)

    selected = [
        keep(cell)
        for cell in cells
        if (not only_jobs or cell.job in only_jobs)
        and (not only_workers or cell.workers in only_workers)
    ]
    return [cell for cell in selected if cell.links and cell.contenders]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of all measurements."""

    rounds: int
    seconds: float
    warm_up: int
    threads: int | None
    torch_python: str
    malloc: str
    delay: float  # milliseconds by which a packet arrives later


class Bench:
    """Runs cells one after another, and gathers what they measured."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self._settings = settings
        self._progress = progress
        self._bar = progress.add_task("")
        self._folder = tempfile.TemporaryDirectory(prefix="gradcomp-network-")
        self.raw: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []

    def run_all(self, cells: Sequence[Cell], shaped: bool) -> None:
        """Measures all cells; those of one number of workers share their links."""
        steps = sum(len(cell.by_framework) * (1 + len(cell.links)) for cell in cells)
        self._progress.update(self._bar, total=steps)
        for workers in dict.fromkeys(cell.workers for cell in cells):
            worker_cells = [cell for cell in cells if cell.workers == workers]
            loopback = contextlib.nullcontext(links.Network(workers))
            delayed = links.network(workers, self._settings.delay / 1000)
            with delayed if shaped else loopback as network:
                self._measure_links(network, worker_cells)
                for cell in worker_cells:
                    self._measure(network, cell)

    def _measure_links(self, network: links.Network, cells: Sequence[Cell]) -> None:
        names = list(dict.fromkeys(link for cell in cells for link in cell.links))
        found = measured_links(network, names)
        self.raw += [
            self._named({"workers": network.workers, **link_result}) for link_result in found
        ]

    def _measure(self, network: links.Network, cell: Cell) -> None:
        for framework, contenders in cell.by_framework.items():
            plan = Plan(
                cell.job,
                contenders,
                cell.links,
                network,
                self._settings.rounds,
                self._settings.seconds,
                self._settings.warm_up,
                output=str(Path(self._folder.name, "measured.json")),
            )
            is_torch = framework == turns.TORCH_NAME
            python = self._settings.torch_python if is_torch else sys.executable
            self._measure_by(framework, plan, python)

    def _measure_by(self, framework: str, plan: Plan, python: str) -> None:
        def on_line(worker: int, stream: str, line: str) -> None:
            if (worker, stream) == (0, "stdout"):
                what = f"{plan.network.workers} workers, {framework}: {line}"
                self._progress.update(self._bar, description=what, advance=1)
                self._progress.console.print(what)

        plan.network.shape(UNSHAPED)  # workers start by sending all weights
        threads = self._settings.threads or shared_out_threads(plan.network.workers)
        command = [python, str(HERE / turns.BACKENDS[framework]), plan.to_text()]
        variables = SETTINGS[self._settings.malloc]
        with placed_job(command, plan.network, threads, on_line, variables) as job:
            result = job.run()
        if result.exit_code:
            raise click.ClickException(
                "\n".join([f"{turns.BACKENDS[framework]}:", *result.summary()])
            )
        self.records += map(self._named, json.loads(Path(plan.output).read_text()))

    def _named(self, record: dict[str, Any]) -> dict[str, Any]:
        """Returns a record whose link's name has the delay."""
        return {**record, "link": link_name(record["link"], self._settings.delay)}


def version(module: str, python: str = sys.executable) -> str:
    """Returns the version of a module's package; empty if the interpreter cannot import it."""
    package = module.partition(".")[0]
    command = [python, "-c", f"import {module}; print({package}.__version__)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if not done.returncode else ""


def facts(settings: Settings, versions: dict[str, str]) -> dict[str, Any]:
    """Returns the other facts that the figures depend on."""
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "machine": processor(),
        "Linux": platform.release(),
        "TensorFlow": tf.__version__,
        **{name: version or "none" for name, version in versions.items()},
        "congestion control": congestion.read_text().strip(),
        "load before": os.getloadavg()[0],
        "threads of each worker": settings.threads or "cores / workers",
        "malloc": settings.malloc,
        "rounds": settings.rounds,
    }


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--short", is_flag=True, help="A few cells and rounds, in some minutes.")
@click.option("--job", "only_jobs", multiple=True, type=click.Choice(turns.NAMES))
@click.option("--workers", "only_workers", multiple=True, type=int)
@click.option("--link", "only_links", multiple=True, type=click.Choice([*SPEEDS, "unshaped"]))
@click.option(
    "--contender",
    "only_contenders",
    multiple=True,
    type=click.Choice([*EVERYONE, turns.GOSSIP, *turns.HOROVOD, *turns.TORCH]),
)
@click.option(
    "--delay",
    default=0.0,
    type=click.FloatRange(min=0),
    help="Delay of each packet in each direction, in milliseconds.",
)
@click.option("--loopback", is_flag=True, help="Use the loopback, also as root.")
@click.option("--rounds", type=click.IntRange(1), help="Turns of each contender. [5, short: 2]")
@click.option("--seconds", default=1.0, help="About how long a turn lasts; one step at least.")
@click.option("--warm-up", default=100, help="Untimed steps of methods with residuals.")
@click.option("--threads", type=int, help="Threads per worker. [all share the cores]")
@click.option("--torch-python", default=sys.executable, help="The Python that has PyTorch.")
@malloc_option
@results_options(str(HERE.parent / "results"))
def main(
    short: bool,
    only_jobs: tuple[str, ...],
    only_workers: tuple[int, ...],
    only_links: tuple[str, ...],
    only_contenders: tuple[str, ...],
    delay: float,
    loopback: bool,
    rounds: int | None,
    seconds: float,
    warm_up: int,
    threads: int | None,
    torch_python: str,
    mallocs: tuple[str, ...],
    results: Path,
    overwrite: bool,
) -> None:
    folders = {malloc: results_folder(results / malloc, FILES, overwrite) for malloc in mallocs}
    console = Console(soft_wrap=True)
    missing = "" if loopback else links.missing(delay / 1000)
    if delay and (loopback or missing):
        raise click.UsageError(missing or "The loopback cannot be delayed: leave out --delay.")
    if missing:
        console.print(f"{missing} So no link is shaped: everything runs on the loopback.")
    versions = {
        turns.HOROVOD_NAME: version("horovod.tensorflow"),
        turns.TORCH_NAME: version("torch.distributed", torch_python),
    }
    for name, python in zip(versions, (sys.executable, torch_python), strict=True):
        if not versions[name]:
            console.print(f"{python} has no {name}: its contenders are left out.")
    shaped = not (loopback or missing)
    cells = chosen(
        SHORT if short else FULL,
        only_jobs=only_jobs,
        only_workers=only_workers,
        only_links=only_links,
        only_contenders=only_contenders,
        frameworks=[name for name in turns.DENSE if versions.get(name, "its own")],
        shaped=shaped,
    )
    rounds = rounds or (2 if short else 5)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    for malloc, folder in folders.items():
        settings = Settings(rounds, seconds, warm_up, threads, torch_python, malloc, delay)
        about = facts(settings, versions)
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            bench = Bench(settings, progress)
            try:
                bench.run_all(cells, shaped)
            finally:  # a cell that fails loses no others
                measured = {"about": about, "raw": bench.raw, "records": bench.records}
                if bench.records:
                    report(measured, folder, console)


def report(measured: dict[str, Any], folder: Path, console: Console) -> None:
    """Writes the figures, the tables and the plots, and shows the tables."""
    files = [folder / name for name in FILES]
    files[0].write_text(json.dumps(measured, indent=1) + "\n")
    text = network_report.markdown(measured)
    files[1].write_text(text)
    files += network_report.draw(measured, folder)
    show(console, text, files)


if __name__ == "__main__":
    main()
