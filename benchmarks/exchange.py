"""Compares our methods with all-reduce in the exchange of a ResNet-50's gradient by two workers.

    python benchmarks/exchange.py
    python benchmarks/exchange.py -c adacomp -c scalecom -c cast -c top_k -c power_sgd

All run in turn in the same processes, over the same collectives, and once for each setting of
malloc. Gradients have the real shapes of keras.applications.ResNet50. Each step gets them in fresh
memory, as from a backward pass. `network.py` does the same for all methods, also on slower links.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import click
import jobs
from machine import processor
from mallocs import SETTINGS, malloc_option
from output import print_table
from reports import reports_of
from rich.table import Table

from tf_gradcomp import compressors

Measured = dict[str, dict[str, Any]]  # of each contender


def work(names: list[str], warmup: int, repeats: int) -> None:
    """Measures all contenders on one worker; prints the times of their steps as JSON."""
    from collectives import collectives
    from gradients import mean_over_workers
    from turns import timed
    from workloads import Exchanges

    import tf_gradcomp as gc

    strategy = gc.MultiWorkerMirroredStrategy()
    exchanges, mean = Exchanges(strategy), mean_over_workers(strategy)
    entries = {name: exchanges.entry(name) for name in names}
    for name, entry in entries.items():
        for _ in range(1 if name == jobs.ALL_REDUCE else warmup):  # the first step traces
            timed(entry.contender, mean)
    before = {name: entry.exchange.traffic() for name, entry in entries.items() if entry.exchange}
    steps: dict[str, list[Any]] = {name: [] for name in names}
    for _ in range(repeats):
        for name, entry in entries.items():
            steps[name].append(timed(entry.contender, mean))
    measured = {}
    for name, entry in entries.items():
        payload = 4 * sum(value.shape.num_elements() for value in entry.source.values)
        if entry.exchange:
            payload = entry.exchange.traffic().since(before[name]).payload_bytes / repeats
        measured[name] = {
            "seconds": [step.seconds for step in steps[name]],
            "page_faults": [step.used.page_faults for step in steps[name]],
            "collectives": len(collectives(entry.contender.step)),
            "payload_bytes": payload,
        }
    print(json.dumps(measured))


def measure(names: list[str], malloc: str, warmup: int, repeats: int) -> Measured:
    """Runs two workers under a setting of malloc; returns the first worker's measurements."""
    args = json.dumps([names, warmup, repeats])
    return reports_of(__file__, args, variables=SETTINGS[malloc])[0]


def rows(malloc: str, measured: Measured) -> list[list[str]]:
    """Returns the table's cells for one setting of malloc."""
    medians = {name: statistics.median(one["seconds"]) for name, one in measured.items()}
    return [
        [
            malloc,
            name,
            *(f"{1e3 * s:.1f}" for s in (medians[name], min(one["seconds"]), max(one["seconds"]))),
            f"{medians[jobs.ALL_REDUCE] / medians[name]:.1f}",
            f"{statistics.median(one['page_faults']):,.0f}",
            str(one["collectives"]),
            f"{one['payload_bytes']:,.0f}",
        ]
        for name, one in measured.items()
    ]


@click.command(help=__doc__)
@click.option(
    "-c",
    "--compressor",
    "names",
    multiple=True,
    default=("adacomp",),
    show_default=True,
    type=click.Choice(compressors.names()),
)
@click.option("--warmup", default=100, show_default=True, help="Steps before timing starts.")
@click.option("--repeats", default=15, show_default=True, help="Timed steps of each contender.")
@malloc_option
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Where to write the figures.",
)
def main(
    names: tuple[str, ...],
    warmup: int,
    repeats: int,
    mallocs: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Prints the table of settings and methods."""
    table = Table(title=f"ResNet-50 gradient, 2 workers on {processor()}, loopback")
    for column in ("malloc", "", "median ms", "min", "max", "times faster", "page faults"):
        table.add_column(column, justify="right")
    table.add_column("collectives", justify="right")
    table.add_column("payload bytes", justify="right")
    measured = {
        malloc: measure([jobs.ALL_REDUCE, *names], malloc, warmup, repeats) for malloc in mallocs
    }
    for malloc, of_one in measured.items():
        for row in rows(malloc, of_one):
            table.add_row(*row)
    print_table(table)
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(measured))


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        work(*json.loads(sys.argv[1]))
    else:
        main()
