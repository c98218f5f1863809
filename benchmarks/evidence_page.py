"""docs/evidence.md: the claims of papers, with their verdicts and what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from claims import CLAIMS, PAPERS
from claims.claim import (
    CANNOT_RUN,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    UNDECIDED,
    Claim,
)
from output import machine, table
from records import Record

Records: TypeAlias = Mapping[str, Sequence[Record]]  # by name of the run with seed 0
Command: TypeAlias = Callable[[Sequence[str]], str]

_VERDICTS = (REPRODUCED, NOT_REPRODUCED, UNDECIDED, CANNOT_RUN, NOT_RUN)
_UNCHECKED = "not checked against the paper"
_INTRODUCTION = f"""# The papers' claims

Do the papers' results hold here? This page lists each headline of the papers, what we ran, and the
result. The runs are simulations: several workers in one process train a small network for a few
hundred steps. They show whether a claim holds at that size. They do not show how a paper's own
network would train.

A claim is *reproduced* if the runs meet all requirements that are named with it, and *not
reproduced* if they miss one. It is *undecided* if training without compression fails itself or is
far from its end, if an accuracy is within one test image of what is required, or if the ratios
differ too much to compare. Some claims were undecided in an earlier run. We then changed their
steps and learning rates after uncompressed training alone, before any compressed run with the new
values.

We could not read the text of every paper. A claim that is marked "{_UNCHECKED}" is from memory or
from a secondary source, so its figures may be wrong. All other claims were read in the paper, its
abstract or its authors' code.

Values are means over the seeds, and ± is the standard deviation. With one seed the spread is
unknown, and another seed may change a verdict. A ratio is a payload ratio of the whole run, as in
the papers, unless the sentence says otherwise. [Machines](benchmarks/README.md#machines) are listed
with the benchmarks.

`benchmarks/evidence.py` does the runs, and `benchmarks/publish.py` writes this page from their
records. Do not edit it.
"""


def results_of(claim: Claim, records: Records) -> dict[str, list[Record]]:
    """The records of a claim's runs, for the seeds that all of them have."""
    records_by_label = {label: records.get(run.name, ()) for label, run in claim.runs.items()}
    seeds = [
        {record["seed"] for record in run_records} for run_records in records_by_label.values()
    ]
    common = set.intersection(*seeds) if seeds else set()
    return {
        label: [record for record in run_records if record["seed"] in common]
        for label, run_records in records_by_label.items()
    }


def summary(records: Records) -> str:
    """How many claims have each verdict, as a sentence."""
    verdicts = [claim.verdict(results_of(claim, records))[0] for claim in CLAIMS.values()]
    counts = Counter(verdicts)
    parts = [f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict]]
    return f"Of {len(CLAIMS)} claims: {', '.join(parts)}.\n"


def page(records: Records, command: Command) -> str:
    """The text of the page."""
    parts = [_INTRODUCTION, f"**{summary(records).strip()}** {measured_on(records)}\n"]
    parts.append(_overview(records))
    for paper in PAPERS:
        parts.append(f"## {paper.name}\n\n{paper.reference}\n")
        parts += [_section(claim, records, command) for claim in paper.claims]
    return "\n".join(parts)


def measured_on(records: Records) -> str:
    """A sentence that names the machines and versions."""
    found = [record for run_records in records.values() for record in run_records]
    if not found:
        return "Nothing has been run yet."
    machines = sorted({machine(record["processor"]) for record in found})
    versions = dict.fromkeys(
        f"TensorFlow {versions['tensorflow']} and Keras {versions['keras']}"
        for versions in (record["versions"] for record in found)
    )
    return f"Measured with {', '.join(versions)} on {' and '.join(machines)}."


def _overview(records: Records) -> str:
    rows = []
    for claim in CLAIMS.values():
        results = results_of(claim, records)
        verdict, outcome = claim.verdict(results)
        seeds = str(len(next(iter(results.values())))) if outcome else ""
        anchor = claim.name.replace("/", "")
        rows.append([f"[{claim.name}](#{anchor})", seeds, f"**{verdict}**"])
    return "\n".join(table(["claim", "seeds", "verdict"], rows)) + "\n"


def _section(claim: Claim, records: Records, command: Command) -> str:
    verdict, outcome = claim.verdict(results_of(claim, records))
    source = "The paper" if claim.checked else _UNCHECKED.capitalize()
    lines = [f"### {claim.name}", "", f"**{source}:** {claim.says}", ""]
    if claim.ran:
        lines += [f"**Run here:** {claim.ran}", ""]
    if outcome:
        values = "; ".join(f"{label}: {value}" for label, value in outcome.found.items())
        lines += [f"**Measured:** {values}.", ""]
    reason = outcome.why if outcome else claim.cannot or "The command does it:"
    lines.append(f"**{verdict.capitalize()}.** {reason}")
    if verdict == NOT_RUN:
        lines += ["", "```", command([claim.name]), "```"]
    return "\n".join(lines) + "\n"
