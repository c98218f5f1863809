"""Repeats the papers' claims, and compares all methods at their defaults.

    GRADCOMP_DATA=FOLDER python benchmarks/evidence.py --resume --jobs 2   # runs without a record
    python benchmarks/evidence.py --resume --only "adacomp/*" --only "methods/digits*" --seeds 3
    python benchmarks/evidence.py --overwrite --only adacomp/bins          # repeats these runs
    python benchmarks/evidence.py --short          # compares AdaComp's lag with recorded lags
    python benchmarks/evidence.py --record-lags    # records those lags

`claims/` lists the claims of each paper. A claim has a few short trainings by learners in one
process, and a check of their records. Each run has a separate process, and adds a record to
`records/evidence.jsonl`. `publish.py` makes docs/evidence.md and the tables of all methods of these
records. FOLDER has `shakespeare.txt.gz`, and `mnist.npz` if Keras cannot download it.

The lag is that of a small LSTM, in bits per character, trained for a few steps on the text that
Python has with it. Its loss is multiplied by a small number, so that Adam's epsilon counts: epsilon
is where a delay of small gradients once crept in. The text differs between versions of Python, and
so does the loss; the lag behind dense training on the same batches differs no more than between
seeds.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
import os
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import evidence_page
import records
import simulated
from claims import CLAIMS
from methods_table import GROUPS
from output import show
from pool import Limits, do_all, missing_runs, pool_options
from rich.console import Console
from simulated import WORK, Run, Training

from tf_gradcomp.cli.options import results_folder, results_options

MOST_SEEDS = 10
LAGS = Path(__file__).with_name("lags.json")
LAGGING = Training("python-faint", 1, 0, 60)
LAG_SEEDS, LAG_EVERY = 6, 20  # every so many steps the model is evaluated
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


def recorded(file: Path) -> dict[str, list[records.Record]]:
    """Returns the existing records, by the name of the run with seed 0."""
    by_name = records.by_name(file)
    found: dict[str, list[records.Record]] = {}
    for run in chosen(()):
        names = (dataclasses.replace(run, seed=seed).name for seed in range(MOST_SEEDS))
        found[run.name] = [by_name[name] for name in names if name in by_name]
    return found


def command(only: Sequence[str]) -> str:
    """Returns the command that does the runs of some groups."""
    patterns = [word for pattern in only for word in ("--only", pattern)]
    return shlex.join(["python", "benchmarks/evidence.py", *patterns, "--resume"])


def lag(seed: int) -> float:
    """Trains dense, and by AdaComp with two learners; returns by how many bits AdaComp is behind.

    This is the mean over all evaluations.
    """
    compressed = dataclasses.replace(LAGGING, seed=seed, learners=2, compressor="adacomp")
    reached = simulated.train(compressed, LAG_EVERY)["curve"]
    return statistics.mean(reached) - statistics.mean(_dense_curve(seed))


@functools.cache
def _dense_curve(seed: int) -> list[float]:
    return simulated.train(dataclasses.replace(LAGGING, seed=seed), LAG_EVERY)["curve"]


def compare_lag() -> str | None:
    """Trains again; returns what is wrong if AdaComp lags more than when that was recorded.

    Four deviations above the mean of the recorded lags pass: other texts and other orders of
    rounding change a lag about as much as another seed.
    """
    lags = json.loads(LAGS.read_text())
    limit, measured = statistics.mean(lags) + 4 * statistics.stdev(lags), lag(0)
    found = f"AdaComp is {measured:+.3f} bits per character behind dense training"
    print(f"{found}; up to {limit:+.3f} were allowed by what is recorded.")
    if measured <= limit:
        return None
    return (
        f"{found}; expected at most {limit:+.3f}. Find what delays gradients, or record the new "
        "lags: python benchmarks/evidence.py --record-lags"
    )


_ONLY = 'Only claims whose name matches, such as "adacomp/*". Give it several times.'


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--only", multiple=True, metavar="PATTERN", help=_ONLY)
@click.option("--seeds", default=1, type=click.IntRange(1, MOST_SEEDS), help="How many: 0, 1, ...")
@pool_options
@click.option("--short", is_flag=True, help="Only compare a short training with recorded lags.")
@click.option("--record-lags", is_flag=True, help="Only record the lags of the short training.")
@click.option("--resume", is_flag=True, help="Reuse existing records.")
@results_options(str(records.FOLDER))
def main(
    only: Sequence[str],
    seeds: int,
    jobs: int,
    threads: int | None,
    minutes: float | None,
    short: bool,
    record_lags: bool,
    resume: bool,
    results: Path,
    overwrite: bool,
) -> None:
    if short:
        sys.exit(compare_lag())
    if record_lags:
        lags = [round(lag(seed), 4) for seed in range(LAG_SEEDS)]
        LAGS.write_text(json.dumps(lags) + "\n")
        return
    file = results_folder(results, [], overwrite) / records.EVIDENCE.name
    runs = list(with_seeds(chosen(only), seeds))
    missing = missing_runs(runs, file, overwrite, resume, "--resume")
    simulated.check_data({run.task for run in missing if isinstance(run, Training)})
    failed = do_all(missing, file, WORK, Limits(jobs, threads, minutes), "--resume")
    show(Console(), evidence_page.summary(recorded(file)), [file])
    if failed:
        sys.exit(f"{failed} runs failed; their output is in {file.parent}.")


if __name__ == "__main__":
    main()
