"""Records new results, and writes the generated parts of pages from all recorded results.

    python benchmarks/publish.py
    python benchmarks/publish.py results/default/network.json results/time-to-accuracy-*.json

Results of `network.py` replace the recorded steps, so give the files of all runs that belong
together. A result of `time_to_accuracy.py` replaces only the recorded trainings with the same task,
optimizer, workers and link. `local_steps_accuracy.py` leaves its own records. In a page, the lines
between `<!-- NAME -->` and `<!-- end of NAME -->` are replaced.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import checklist
import click
import local_steps_accuracy
import network_report
import records
import time_to_accuracy_report
import turns
import worth_it
from output import table, times
from setups import CASTS, Setup, setups
from time_to_accuracy_report import mean_ratio, sooner
from worth_it import METHOD, NAMES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "benchmarks"
CHECKLIST, WORTH_IT = DOCS / "checklist.md", DOCS / "worth_it.md"
LOCAL_STEPS = DOCS / "local_steps.md"
LAST_RUN, SOONER = DOCS / "last_run.md", DOCS / "time_to_accuracy.md"
FRONT, README = ROOT / "benchmarks" / "README.md", ROOT / "README.md"

FRONT_LINKS = ("100 Mbit/s", "1 Gbit/s")
FRONT_TASKS = {
    "digits": "the digits network",
    "transformer": "a small Transformer",
    "text": "a character LSTM",
}
_COLUMNS = ("AdaComp, two workers", *FRONT_LINKS)


def blocks() -> dict[Path, dict[str, str]]:
    """Returns the generated parts of all pages, by page and name."""
    measured = records.read_network()
    found, trained = setups(measured), measured["setups"]
    parts = {
        CHECKLIST: {
            "count of steps": checklist.count(found),
            "count of trainings": time_to_accuracy_report.count(trained),
            "errors of the model": checklist.held_out(found),
            "steps": checklist.steps(found),
        },
        WORTH_IT: {"tables": worth_it.full_tables(found)},
        SOONER: {"trainings": time_to_accuracy_report.details(trained)},
        LOCAL_STEPS: {"tables": [local_steps_accuracy.tables_of(records.LOCAL_STEPS)]},
        FRONT: {
            "findings": _findings(found, trained),
            "losses": [checklist.total(found)],
        },
        README: {
            "losses": [checklist.total(found)],
            "trainings": _trainings(trained),
            "speed-ups": _steps(found),
            "worth it": worth_it.small_table(found),
        },
    }
    texts = {page: _texts(page_blocks) for page, page_blocks in parts.items()}
    for page in (CHECKLIST, WORTH_IT):
        texts[page]["machine"] = _machine(measured["about"])
    return texts


def _machine(about: Mapping[str, str]) -> str:
    names = (turns.TENSORFLOW_NAME, turns.HOROVOD_NAME, turns.TORCH_NAME, "malloc")
    facts = [f"{name} {about[name]}" for name in names if about.get(name, "none") != "none"]
    measured = f"Steps were measured on {', '.join([about['machine'], *facts])}."
    return " ".join([measured, about.get("note", "")]).strip()


def _texts(page_blocks: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {name: "\n".join(lines).strip() for name, lines in page_blocks.items()}


def _findings(found: Sequence[Setup], trained: Sequence[Mapping[str, Any]]) -> list[str]:
    """Yields the lines of a table of steps and whole trainings."""
    of_two = [s for s in found if s.workers == 2 and METHOD in s.records]
    rows = [
        [f"a step: {NAMES[job]}", *(_step(of_two, job, link) for link in FRONT_LINKS)]
        for job in dict.fromkeys(setup.job for setup in of_two)
    ]
    rows += [
        [f"to dense accuracy: {name}", *(_training(trained, task, link) for link in FRONT_LINKS)]
        for task, name in FRONT_TASKS.items()
    ]
    return table(_COLUMNS, rows)


def _step(found: Sequence[Setup], job: str, link: str) -> str:
    ratios = (_over_baselines(s) for s in found if (s.job, s.link) == (job, link))
    return next((f"{times(dense)} ({times(cast)})" for dense, cast in ratios), "")


def _training(trained: Sequence[Mapping[str, Any]], task: str, link: str) -> str:
    link_setups = (s for s in trained if (s["task"], s["workers"], s["link"]) == (task, 2, link))
    rows = (row for s in link_setups for row in sooner(s) if row.method == METHOD)
    means = (map(times, (mean_ratio(row.dense), mean_ratio(row.cast))) for row in rows)
    return next((f"{dense} ({cast})" for dense, cast in means), "")


def _over_baselines(setup: Setup) -> tuple[float, float]:
    """Returns AdaComp's speed-ups over the best dense step and the best 16-bit cast."""
    cast = min(setup.seconds(name) for name in CASTS if name in setup.records)
    return setup.dense / setup.seconds(METHOD), cast / setup.seconds(METHOD)


def _steps(found: Sequence[Setup]) -> Iterator[str]:
    """Yields a line on the MLP's steps for each link."""
    for link in FRONT_LINKS:
        for setup in found:
            if (setup.job, setup.workers, setup.link) == (turns.MLP, 2, link):
                dense, cast = map(times, _over_baselines(setup))
                yield (
                    f"At {link}, a step of a model with 2.4 million weights is {dense} times "
                    f"faster with AdaComp than the best dense step, and {cast} times than with "
                    "16 bits."
                )


def _trainings(trained: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line on the time to an accuracy for each link."""
    for link in FRONT_LINKS:
        parts = (f"{name} {_training(trained, task, link)}" for task, name in FRONT_TASKS.items())
        yield f"At {link}: {'; '.join(parts)}."


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


def write(texts: Mapping[Path, Mapping[str, str]]) -> None:
    """Writes generated parts into their pages."""
    for page, page_texts in texts.items():
        page.write_text(filled(page.read_text(), page_texts))


def _drawn(measured: records.Record) -> list[records.Record]:
    """Returns the records of the plots on the page of the last full run."""
    large = (turns.EXCHANGE, turns.MLP)
    return [
        record
        for record in measured["records"]
        if record["workers"] == 2 and record["job"] in large
    ]


def _take_plots(results: Iterable[Path]) -> None:
    """Replaces the plots of pages by the plots in the folders of results."""
    for file in results:
        for plot in file.parent.glob(f"{file.stem}-*.png"):
            if (ROOT / "benchmarks" / plot.name).exists():
                shutil.copy(plot, ROOT / "benchmarks")


@click.command(help=__doc__)
@click.argument("results", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(results: tuple[Path, ...]) -> None:
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
        write({LAST_RUN: {"tables": network_report.markdown(measured)}})
        network_report.draw({**measured, "records": _drawn(measured)}, ROOT / "benchmarks")
    if training_runs:
        recorded["setups"] = records.merge_times(training_runs, recorded["setups"])
        _take_plots(results)
    records.write_network(recorded)
    write(blocks())
    worth_it.draw(setups(recorded), ROOT / "benchmarks" / "worth-it.png")


if __name__ == "__main__":
    main()
