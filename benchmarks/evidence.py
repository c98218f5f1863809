"""Repeats what the papers found, and compares all methods; writes docs/evidence.md.

    GRADCOMP_DATA=FOLDER python benchmarks/evidence.py --jobs 2
    python benchmarks/evidence.py --only "adacomp/mnist_cnn*" --only "methods/digits*" --seeds 3
    python benchmarks/evidence.py --resume       # goes on where it was interrupted
    python benchmarks/evidence.py --resume --page-only    # of the records that there are
    python benchmarks/evidence.py --short        # a twentieth of the steps: whether all runs

Each claim of a paper has a few short trainings by learners in one process, which `claims/` lists
with the check that judges them. The runs of `methods/*` make docs/benchmarks/methods_table.md. Each
run is a process of its own, and leaves a record. FOLDER has `shakespeare.txt.gz`, and `mnist.npz`
where Keras cannot download it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import evidence_page
import simulated
from claims import CLAIMS
from evidence_jobs import Pool, Run, expected_seconds, record_of
from methods_table import GROUPS
from output import show
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from simulated import Training
from trainings import RESULTS

from tf_gradcomp.cli.options import results_folder, results_options

ROOT = Path(__file__).resolve().parents[1]
SHORTER = 20  # times fewer steps
MOST_SEEDS = 10
# The groups whose runs come first: a machine may be there for minutes only.
FIRST = (
    *("adacomp/mnist_cnn", "adacomp/char_lstm", "methods/digits_2", "methods/digits_8"),
    *("adacomp/*", "scalecom/*", "lgc/*", "lgreco/*", "methods/*_8"),
)


def groups() -> dict[str, Sequence[Run]]:
    """Returns the runs of each claim and of each part of the table of methods, in their order."""
    found = {name: tuple(claim.runs.values()) for name, claim in CLAIMS.items() if claim.runs}
    found |= GROUPS
    ordered = [name for pattern in (*FIRST, "*") for name in fnmatch.filter(found, pattern)]
    return {name: found[name] for name in dict.fromkeys(ordered)}


def chosen(only: Sequence[str]) -> list[Run]:
    """Returns the runs of the groups whose names match, each once.

    Raises:
        click.UsageError: If a pattern matches nothing.
    """
    found = groups()
    for pattern in only:
        if not fnmatch.filter([*found, *CLAIMS], pattern):
            raise click.UsageError(f"No claim matches {pattern}; one is {next(iter(found))}.")
    names = [name for name in found if not only or any(fnmatch.fnmatch(name, p) for p in only)]
    return list(dict.fromkeys(run for name in names for run in found[name]))


def with_seeds(runs: Sequence[Run], seeds: int) -> Iterator[Run]:
    """Yields all runs with the first seed, then with the next one, and so on."""
    for seed in range(seeds):
        for run in runs:
            yield dataclasses.replace(run, seed=seed)


def shorter(run: Run) -> Run:
    """Returns a run with few steps, to see whether it runs."""
    if isinstance(run, Training):
        return dataclasses.replace(run, steps=max(4, run.steps // SHORTER))
    return run


def records(folder: Path, short: bool) -> dict[str, list[dict[str, Any]]]:
    """Returns the records that there are, by the name of the run with seed 0."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in dict.fromkeys(run for runs in groups().values() for run in runs):
        of_seeds = (dataclasses.replace(run, seed=seed) for seed in range(MOST_SEEDS))
        files = [record_of(folder, shorter(one) if short else one) for one in of_seeds]
        found[run.name] = [json.loads(file.read_text()) for file in files if file.exists()]
    return found


def command(only: Sequence[str]) -> str:
    """Returns the command that does the runs of some groups."""
    patterns = [word for pattern in only for word in ("--only", pattern)]
    return shlex.join(["python", "benchmarks/evidence.py", *patterns, "--resume"])


def _check_resumed(folder: Path, runs: Sequence[Run]) -> None:
    """Refuses records that other code of this program has left under the same name."""
    for run in runs:
        file = record_of(folder, run)
        if file.exists():
            record, wanted = json.loads(file.read_text()), dataclasses.asdict(run)
            if {key: record.get(key) for key in wanted} != wanted:
                raise click.UsageError(
                    f"'{file}' cannot be taken by --resume: it is of another run than "
                    f"{wanted}; delete it, or give another folder by --results."
                )


def _do(runs: Sequence[Run], folder: Path, jobs: int, threads: int, minutes: float | None) -> int:
    """Does all runs, and shows how far they are; returns how many failed."""
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left:"), TimeRemainingColumn(), console=console) as bar:
        whole = bar.add_task("runs", total=sum(map(expected_seconds, runs)))
        pool = Pool(folder, jobs, threads, lambda done: bar.update(whole, completed=done))
        ended = failed = 0
        for run, good in pool.run_all(runs, 60 * minutes if minutes else None):
            ended += 1
            failed += not good
            bar.update(whole, description=f"{ended} of {len(runs)} runs")
            console.print(f"{ended} of {len(runs)}: {run.name}: {_said(folder, run, good)}")
    if ended < len(runs):
        console.print(f"{len(runs) - ended} runs have not ended: --resume does them.")
    return failed


def _said(folder: Path, run: Run, good: bool) -> str:
    if not good:
        return f"failed, see {folder / run.name}.log"
    record = json.loads(record_of(folder, run).read_text())
    if isinstance(run, Training):
        return f"{record['quality']:.3f}, {record['seconds']:.0f} s"
    return f"{record['encode_ms']:.1f} and {record['decode_ms']:.1f} ms"


def _write(pages: Mapping[str, str], folder: Path) -> list[Path]:
    files = []
    for name, text in pages.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        files.append(file)
    return files


_ONLY = 'Only claims whose name matches, such as "adacomp/*". Give it several times.'


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--only", multiple=True, metavar="PATTERN", help=_ONLY)
@click.option("--seeds", default=1, type=click.IntRange(1, MOST_SEEDS), help="How many: 0, 1, ...")
@click.option("--jobs", default=1, type=click.IntRange(min=1), help="How many runs at once.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    show_default="the cores, shared out among the jobs",
    help="Of each run.",
)
@click.option("--minutes", type=float, help="Stop after so many; what has not ended is left out.")
@click.option("--short", is_flag=True, help=f"Take {SHORTER} times fewer steps; leave docs/ alone.")
@click.option("--resume", is_flag=True, help="Take records that are there already.")
@click.option("--page-only", is_flag=True, help="Do no runs; write the pages.")
@click.option(
    "--docs",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="docs/, or with --short the results' folder",
    help="Write the pages into this folder.",
)
@results_options(str(RESULTS / "evidence"))
def main(
    only: Sequence[str],
    seeds: int,
    jobs: int,
    threads: int | None,
    minutes: float | None,
    short: bool,
    resume: bool,
    page_only: bool,
    docs: Path | None,
    results: Path,
    overwrite: bool,
) -> None:
    runs = [shorter(run) if short else run for run in with_seeds(chosen(only), seeds)]
    wanted = list(dict.fromkeys(runs))
    files = [] if resume or page_only else [record_of(Path(), run).name for run in wanted]
    folder = results_folder(results, files, overwrite or resume)
    _check_resumed(folder, wanted)
    missing = [run for run in wanted if not record_of(folder, run).exists()]
    failed = 0
    if missing and not page_only:
        simulated.check_data({run.task for run in missing if isinstance(run, Training)})
        threads = threads or max(1, (os.cpu_count() or 1) // jobs)
        failed = _do(missing, folder, jobs, threads, minutes)
    pages = evidence_page.pages(records(folder, short), command)
    written = _write(pages, docs or (folder if short else ROOT / "docs"))
    show(Console(), evidence_page.summary(records(folder, short)), written)
    if failed:
        sys.exit(f"{failed} runs failed; {folder} has what they printed.")


if __name__ == "__main__":
    main()
