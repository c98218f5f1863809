"""Records new results, and writes the generated parts of pages from all recorded results.

    python benchmarks/publish.py
    python benchmarks/publish.py results/default/network.json results/time-to-accuracy-*.json
    python benchmarks/publish.py --steps     # only prints tables of all recorded steps

Results of `network.py` replace the recorded steps, so give the files of all runs that belong
together. A result of `time_to_accuracy.py` replaces only the recorded trainings with the same task,
optimizer, workers and link. `evidence.py`, `local_steps_accuracy.py` and `faults.py` leave their
own records. In a page, the lines between `<!-- NAME -->` and `<!-- end of NAME -->` are replaced.
docs/evidence.md is replaced as a whole. `pictures.py` draws the pictures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import click
import evidence
import evidence_page
import faults_report
import local_steps_accuracy
import local_steps_runs
import losses
import methods_table
import network_report
import pictures
import records
import time_to_accuracy_report
import turns
import worth_it
from setups import setups
from worth_it import Steps

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
EVIDENCE, METHODS = DOCS / "evidence.md", DOCS / "methods.md"
BENCHMARKS = DOCS / "benchmarks"

Lines: TypeAlias = Iterable[str]


def blocks(found: evidence_page.Records) -> dict[Path, dict[str, str]]:
    """The generated parts of all pages, by page and name.

    Args:
        found: What `evidence.recorded` returns.
    """
    measured = records.read_network()
    steps, trained = setups(measured), measured["setups"]
    grouped = network_report.grouped(measured["records"], "job", "workers", "link")
    rounds = local_steps_accuracy.rows_of(records.LOCAL_STEPS)
    by_adam = [row for row in rounds if row["inner"] == "adam"]
    readings = local_steps_accuracy.READINGS
    faults = [*records.by_name(records.FAULTS).values()]
    large = time_to_accuracy_report.large_transformer(trained)
    parts: dict[Path, dict[str, Lines]] = {
        ROOT / "README.md": {"worth it": worth_it.small_table(steps, *large)},
        BENCHMARKS / "worth_it.md": {
            "two workers": worth_it.speed_ups(steps, Steps.over_dense, (2,)),
            "more workers": worth_it.speed_ups(steps, Steps.over_dense, (4, 8, 32)),
            "over 16 bits": worth_it.speed_ups(steps, Steps.over_cast, (2, 8)),
            "models": worth_it.models_table(steps),
            "losses": [losses.total(steps)],
            "count of steps": losses.count(steps),
            "count of trainings": time_to_accuracy_report.count(trained),
            "errors of the model": losses.held_out(steps),
        },
        BENCHMARKS / "time_to_accuracy.md": {
            "sooner": time_to_accuracy_report.speed_ups(trained),
            "steps": time_to_accuracy_report.step_times(trained),
        },
        BENCHMARKS / "links.md": {
            "steps": losses.steps(steps),
            "counts": [network_report.agreement(grouped), network_report.accuracy(grouped)],
        },
        BENCHMARKS / "accuracy.md": {
            "bold": [methods_table.named_wins(found)],
            **{f"{n} workers": methods_table.markdown(found, n) for n in methods_table.LEARNERS},
            "longest rounds": [local_steps_runs.longest(by_adam)],
            "rounds": [local_steps_runs.several_seeds(by_adam, readings)],
            "muon": [local_steps_runs.by_inner_optimizer(rounds, readings)],
        },
        BENCHMARKS / "faults.md": {
            "restarts": faults_report.restart_table(faults),
            "kept": faults_report.kept_table(faults),
            "pauses": faults_report.pause_table(faults),
        },
        BENCHMARKS / "kernels.md": {"encoding": methods_table.times_of_encoding(found)},
        METHODS: {"bytes": methods_table.fewer_bytes(found, methods_table.PLOTTED)},
    }
    return {
        page: {name: "\n".join(lines).strip() for name, lines in page_blocks.items()}
        for page, page_blocks in parts.items()
    }


def filled(page: str, texts: Mapping[str, str]) -> str:
    """Returns the page with its named parts replaced.

    Raises:
        ValueError: If the page lacks a part.
    """
    for name, text in texts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        page, count = pattern.subn(lambda _, t=f"{begin}\n\n{text}\n\n{end}": t, page)
        if count != 1:
            raise ValueError(f"{begin} ... {end} is there {count} times; expected once.")
    return page


def pages() -> dict[Path, str]:
    """Returns the texts of all pages, with their generated parts from the records."""
    found = evidence.recorded(records.EVIDENCE)
    texts = {page: filled(page.read_text(), parts) for page, parts in blocks(found).items()}
    return {**texts, EVIDENCE: evidence_page.page(found, evidence.command)}


def _record(results: Sequence[Path]) -> None:
    """Records new results, and draws their pictures.

    Raises:
        click.UsageError: If a file is of another program, or a run of steps is not complete.
    """
    runs = [json.loads(file.read_text()) for file in results]
    link_runs = [run for run in runs if "raw" in run]
    training_runs = [run for run in runs if "links" in run]
    if len(link_runs) + len(training_runs) < len(runs):
        raise click.UsageError("Give files of network.py or time_to_accuracy.py, in JSON.")
    recorded = records.read_network()
    if link_runs:
        measured = records.merge_steps(link_runs)
        if (turns.EXCHANGE, 2) not in {
            (record["job"], record["workers"]) for record in measured["records"]
        }:
            raise click.UsageError(
                "The pages need the exchange with 2 workers. Give all files of a run together."
            )
        recorded |= measured
    if training_runs:
        recorded["setups"] = records.merge_times(training_runs, recorded["setups"])
    records.write_network(recorded)
    for name in pictures.OF_LINKS:
        pictures.PICTURES[name](ROOT / name)


@click.command(help=__doc__)
@click.argument("results", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--steps", is_flag=True, help="Only print tables of all recorded steps.")
def main(results: tuple[Path, ...], steps: bool) -> None:
    if steps:
        print(network_report.markdown(records.read_network()))
        return
    if results:
        _record(results)
    for page, text in pages().items():
        page.write_text(text)


if __name__ == "__main__":
    main()
