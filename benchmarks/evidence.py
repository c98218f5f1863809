"""Repeats the papers' claims, and compares all methods; writes docs/evidence.md.

    GRADCOMP_DATA=FOLDER python benchmarks/evidence.py --resume --jobs 2   # runs without a record
    python benchmarks/evidence.py --resume --only "adacomp/*" --only "methods/digits*" --seeds 3
    python benchmarks/evidence.py --overwrite --only adacomp/bins          # repeats these runs
    python benchmarks/evidence.py --page-only      # only writes the pages, from existing records
    python benchmarks/evidence.py --short          # compares AdaComp's lag with recorded lags

`claims/` lists the claims of each paper. A claim has a few short trainings by learners in one
process, and a check of their records. docs/benchmarks/methods_table.md is made of the runs of
`methods/*`. Each run has a separate process, and leaves a record in benchmarks/records/evidence.
FOLDER needs `shakespeare.txt.gz`, and `mnist.npz` if Keras cannot download it.
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
import lag
import simulated
from claims import CLAIMS
from evidence_jobs import WORK, Run
from methods_table import GROUPS
from output import show
from pool import Limits, check_resumed, do_all, pool_options, record_of
from records import EVIDENCE
from rich.console import Console
from simulated import Training

from tf_gradcomp.cli.options import results_folder, results_options

ROOT = Path(__file__).resolve().parents[1]
MOST_SEEDS = 10
OF_CLAIMS = {name: tuple(claim.runs.values()) for name, claim in CLAIMS.items() if claim.runs}


def chosen(only: Sequence[str]) -> list[Run]:
    """Returns the runs of the matching claims and parts of the table, each once, in their order.

    The runs of claims come first, followed by the runs of each part of the table. Within the claims
    and within each part, the longest runs come first, so that all cores are used until the end.

    Raises:
        click.UsageError: If a pattern matches nothing.
    """
    for pattern in only:
        if not fnmatch.filter([*CLAIMS, *GROUPS], pattern):
            raise click.UsageError(f"No claim matches {pattern}; one is {next(iter(CLAIMS))}.")

    def matching(groups: Mapping[str, Sequence[Run]]) -> list[Sequence[Run]]:
        found = [name for pattern in only or ["*"] for name in fnmatch.filter(groups, pattern)]
        return [groups[name] for name in groups if name in found]

    claimed = [run for runs in matching(OF_CLAIMS) for run in runs]
    parts = [claimed, *matching(GROUPS)]
    ordered = (sorted(part, key=WORK.seconds, reverse=True) for part in parts)
    return list(dict.fromkeys(run for part in ordered for run in part))


def with_seeds(runs: Sequence[Run], seeds: int) -> Iterator[Run]:
    """Yields all runs with the first seed, then with the next one, and so on."""
    for seed in range(seeds):
        for run in runs:
            yield dataclasses.replace(run, seed=seed)


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the existing records, by the name of the run with seed 0."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in chosen(()):
        of_seeds = (dataclasses.replace(run, seed=seed) for seed in range(MOST_SEEDS))
        files = [record_of(folder, one) for one in of_seeds]
        found[run.name] = [json.loads(file.read_text()) for file in files if file.exists()]
    return found


def command(only: Sequence[str]) -> str:
    """Returns the command that does the runs of some groups."""
    patterns = [word for pattern in only for word in ("--only", pattern)]
    return shlex.join(["python", "benchmarks/evidence.py", *patterns, "--resume"])


def _write(found: evidence_page.Records, folder: Path) -> list[Path]:
    """Writes the pages and the plot of records; returns the files."""
    import methods_plot  # needs matplotlib, which the runs do not

    files = []
    for name, text in evidence_page.pages(found, command).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        files.append(file)
    methods_plot.draw(found, folder / evidence_page.METHODS_PLOT)
    return [*files, folder / evidence_page.METHODS_PLOT]


_ONLY = 'Only claims whose name matches, such as "adacomp/*". Give it several times.'


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--only", multiple=True, metavar="PATTERN", help=_ONLY)
@click.option("--seeds", default=1, type=click.IntRange(1, MOST_SEEDS), help="How many: 0, 1, ...")
@pool_options
@click.option("--short", is_flag=True, help="Only compare a short training with recorded lags.")
@click.option("--resume", is_flag=True, help="Reuse existing records.")
@click.option("--page-only", is_flag=True, help="Only write the pages, from existing records.")
@click.option(
    "--docs",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / "docs",
    show_default="docs",
    help="Write the pages into this folder.",
)
@results_options(str(EVIDENCE))
def main(
    only: Sequence[str],
    seeds: int,
    jobs: int,
    threads: int | None,
    minutes: float | None,
    short: bool,
    resume: bool,
    page_only: bool,
    docs: Path,
    results: Path,
    overwrite: bool,
) -> None:
    if short:
        sys.exit(lag.compare())
    wanted = list(with_seeds(chosen(only), seeds))
    files = [] if resume or page_only else [record_of(Path(), run).name for run in wanted]
    folder = results_folder(results, files, overwrite or resume)
    check_resumed(folder, wanted, "--resume")
    missing = [run for run in wanted if not record_of(folder, run).exists()]
    failed = 0
    if missing and not page_only:
        simulated.check_data({run.task for run in missing if isinstance(run, Training)})
        failed = do_all(missing, folder, WORK, Limits(jobs, threads, minutes), "--resume")
    found = records(folder)
    written = _write(found, docs)
    show(Console(), evidence_page.summary(found), written)
    if failed:
        sys.exit(f"{failed} runs failed; their output is in {folder}.")


if __name__ == "__main__":
    main()
