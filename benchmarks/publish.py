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
from collections.abc import Iterable, Mapping
from pathlib import Path

import checklist
import click
import headline
import jobs
import local_steps_accuracy
import network_plots
import network_report
import records
import sooner
import worth_it
import worth_it_plot
from setups import setups

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "benchmarks"
CHECKLIST, WORTH_IT = DOCS / "checklist.md", DOCS / "worth_it.md"
LOCAL_STEPS = DOCS / "local_steps.md"
LAST_RUN, SOONER = DOCS / "last_run.md", DOCS / "time_to_accuracy.md"
FRONT, README = ROOT / "benchmarks" / "README.md", ROOT / "README.md"


def blocks() -> dict[Path, dict[str, str]]:
    """Returns the generated parts of all pages, by page and name."""
    measured = records.read(records.NETWORK)
    found = setups(measured)
    trained = records.read(records.TIMES)
    parts = {
        CHECKLIST: {
            "count of steps": checklist.count(found),
            "count of trainings": sooner.count(trained["setups"]),
            "errors of the model": checklist.held_out(found),
            "steps": checklist.steps(found),
        },
        WORTH_IT: {"tables": worth_it.full_tables(found)},
        SOONER: {"trainings": sooner.details(trained["setups"])},
        LOCAL_STEPS: {"tables": [local_steps_accuracy.tables_of(records.LOCAL_STEPS)]},
        FRONT: {
            "findings": headline.findings(found, trained["setups"]),
            "losses": [checklist.total(found)],
        },
        README: {
            "losses": [checklist.total(found)],
            "trainings": headline.trainings(trained["setups"]),
            "speed-ups": headline.steps(found),
            "worth it": worth_it.small_table(found),
        },
    }
    texts = {page: _texts(of_page) for page, of_page in parts.items()}
    for page in (CHECKLIST, WORTH_IT):
        texts[page]["machine"] = _machine(measured["about"])
    return texts


def _machine(about: Mapping[str, str]) -> str:
    names = (jobs.TENSORFLOW_NAME, jobs.HOROVOD_NAME, jobs.TORCH_NAME, "malloc")
    facts = [f"{name} {about[name]}" for name in names if about.get(name, "none") != "none"]
    measured = f"Steps were measured on {', '.join([about['machine'], *facts])}."
    return " ".join([measured, about.get("note", "")]).strip()


def _texts(of_page: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {name: "\n".join(lines).strip() for name, lines in of_page.items()}


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
    for page, of_page in texts.items():
        page.write_text(filled(page.read_text(), of_page))


def _drawn(measured: records.Measured) -> list[records.Measured]:
    """Returns the records of the plots on the page of the last full run."""
    large = (jobs.EXCHANGE, jobs.MLP)
    return [one for one in measured["records"] if one["workers"] == 2 and one["job"] in large]


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
    of_links = [run for run in runs if "raw" in run]
    of_trainings = [run for run in runs if "links" in run]
    if len(of_links) + len(of_trainings) < len(runs):
        raise click.UsageError("Give files of network.py or time_to_accuracy.py, in JSON.")
    if of_links:
        measured = records.of_network(of_links)
        found = {(one["job"], one["workers"]) for one in measured["records"]}
        if (jobs.EXCHANGE, 2) not in found:
            raise click.UsageError(
                "The pages need the exchange with 2 workers. Give all files of a run together."
            )
        records.write(measured, records.NETWORK)
        write({LAST_RUN: {"tables": network_report.markdown(measured)}})
        network_plots.draw({**measured, "records": _drawn(measured)}, ROOT / "benchmarks")
    if of_trainings:
        earlier = records.read(records.TIMES)["setups"]
        records.write(records.of_times(of_trainings, earlier), records.TIMES)
        _take_plots(results)
    write(blocks())
    worth_it_plot.draw(setups(records.read(records.NETWORK)), ROOT / "benchmarks" / "worth-it.png")


if __name__ == "__main__":
    main()
