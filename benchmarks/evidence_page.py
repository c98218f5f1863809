"""The pages that evidence.py writes: claims with their verdicts, and the table of all methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import methods_table
from claims import CLAIMS, PAPERS
from claims.claim import (
    CANNOT_RUN,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    UNDECIDED,
    Claim,
    Outcome,
)
from output import table
from records import Record

Records: TypeAlias = Mapping[str, Sequence[Record]]  # by name of the run with seed 0
Command: TypeAlias = Callable[[Sequence[str]], str]

METHODS_PLOT = "benchmarks/methods.png"
_VERDICTS = (REPRODUCED, NOT_REPRODUCED, UNDECIDED, CANNOT_RUN, NOT_RUN)
_INTRODUCTION = """# Evidence

Do the papers' results hold here? This page lists each headline, what was run, and the result.
`benchmarks/evidence.py` writes the page, and the [table of all
methods](benchmarks/methods_table.md), from the records in `benchmarks/records/evidence.jsonl`. Each
run has a record with its settings, seed, machine, versions, curve and bytes. Do not edit the page.

- The runs are simulations: learners in one process train a small network for a few hundred steps.
  They show whether a claim holds at that size, and not how a paper's own network would train.
- Some claims were undecided in an earlier run. Their steps and learning rates were changed after
  dense training alone, before any compressed run with the new values.
- "Recalled" marks figures that we know from memory or at second hand. All other figures were read
  in the paper.
- "Reproduced" means that the runs meet all requirements named with the claim, and "not reproduced"
  that they miss one. A claim is undecided if dense training itself fails or is far from its end, if
  an accuracy is within one test image of what is required, or if the ratios differ too much to
  compare.
- Values are means over the seeds, and ± is the standard deviation. With one seed, the spread is
  unknown, and another seed may change a verdict.
- A ratio is a payload ratio of the whole run, unless the sentence says otherwise.
"""
_METHODS = """# All methods at their defaults

Which method sends the fewest bytes and trains like dense? All methods train with their default
settings, with 2, 8 and 32 learners in one process. `benchmarks/evidence.py --only "methods/*"`
writes this page.

- "Digits" is the digits network with batches of 64 images; its accuracy is the mean over the last
  five epochs. "MNIST" is the same network with batches of 64 images. "LSTM" is the character LSTM
  on Shakespeare with batches of 32 sequences. All are trained by Adam. Runs as short as these show
  how a method begins; the runs with 32 learners are shortest.
- "Behind dense" is the difference from dense training with the same seeds. A method is level with
  dense training if it is at most 1 point behind on digits, 0.3 points on MNIST, and 0.03 bits in
  the LSTM.
- "MB sent" is what a worker sends in the whole run, in a ring. A value is bold if the method is
  level with dense training, and if no other level method sends less and is about as accurate. No
  value of a column is bold before all methods have been run.
- With one seed, the spread over seeds is unknown, so smaller differences between two methods mean
  nothing, either.
- "Encode" and "decode" are the processor's milliseconds of a learner before and after its last
  collective, for a matrix of 262,144 elements on one thread. L-GreCo takes as long as the
  method that it plans, and [LGC's times](../lgc_measured.md#what-a-step-costs) are measured
  apart.
- By default, LGC sends dense gradients in its first 200 steps, and does not reach its third phase
  in these runs.
"""
_PLOT = (
    "Kilobytes that a worker sends in a step of the digits network with 2, 8 and 32 workers, and "
    "points of accuracy behind dense training"
)


def results_of(claim: Claim, records: Records) -> dict[str, list[Record]]:
    """Returns the records of a claim's runs, for the seeds that all of them have."""
    records_by_label = {label: records.get(run.name, ()) for label, run in claim.runs.items()}
    seeds = [
        {record["seed"] for record in run_records} for run_records in records_by_label.values()
    ]
    common = set.intersection(*seeds) if seeds else set()
    return {
        label: [record for record in run_records if record["seed"] in common]
        for label, run_records in records_by_label.items()
    }


def pages(records: Records, command: Command) -> dict[str, str]:
    """Returns the text of each page, by its file."""
    return {
        "evidence.md": _evidence(records, command),
        "benchmarks/methods_table.md": _methods(records, command),
    }


def summary(records: Records) -> str:
    """Returns how many claims have each verdict, as a sentence."""
    verdicts = [claim.verdict(results_of(claim, records))[0] for claim in CLAIMS.values()]
    counts = Counter(verdicts)
    parts = [f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict]]
    return f"Of {len(CLAIMS)} claims: {', '.join(parts)}.\n"


def _evidence(records: Records, command: Command) -> str:
    parts = [_INTRODUCTION, f"**{summary(records).strip()}** {_machines(records)}\n"]
    parts.append(_overview(records))
    for paper in PAPERS:
        parts.append(f"## {paper.name}\n\n{paper.reference}\n")
        parts += [_section(claim, records, command) for claim in paper.claims]
    return "\n".join(parts)


def _machines(records: Records) -> str:
    found = [record for run_records in records.values() for record in run_records]
    if not found:
        return "Nothing has been run yet."
    machines = dict.fromkeys(record["processor"] for record in found)
    versions = dict.fromkeys(
        f"TensorFlow {versions['tensorflow']} and Keras {versions['keras']}"
        for versions in (record["versions"] for record in found)
    )
    return f"Measured with {', '.join(versions)} on {', '.join(machines)}."


def _overview(records: Records) -> str:
    header = ["claim", "the paper", "read or recalled", "measured", "seeds", "verdict"]
    rows = []
    for claim in CLAIMS.values():
        results = results_of(claim, records)
        verdict, outcome = claim.verdict(results)
        seeds = str(len(next(iter(results.values())))) if outcome else ""
        kind = "recalled" if claim.recalled else "read"
        found = outcome.found if outcome else ""
        rows.append([claim.name, claim.figure, kind, found, seeds, f"**{verdict}**"])
    return "\n".join(table(header, rows)) + "\n"


def _section(claim: Claim, records: Records, command: Command) -> str:
    verdict, outcome = claim.verdict(results_of(claim, records))
    recalled = " (recalled)" if claim.recalled else ""
    lines = [f"### {claim.name}", "", f"{claim.says}{recalled}", ""]
    lines += [*_found(claim, outcome), f"**{verdict.capitalize()}.** {_reason(claim, outcome)}"]
    if verdict == NOT_RUN:
        lines += ["", "```", command([claim.name]), "```"]
    return "\n".join(lines) + "\n"


def _found(claim: Claim, outcome: Outcome | None) -> Iterator[str]:
    if claim.ran:
        measured = f" Result: {outcome.found}." if outcome else ""
        yield f"Run here: {claim.ran}{measured}"
        yield ""


def _reason(claim: Claim, outcome: Outcome | None) -> str:
    if outcome:
        return outcome.why
    return claim.cannot or "The command does it:"


def _methods(records: Records, command: Command) -> str:
    machines = f"{_machines(_method_records(records))}{_timed_on(records)}\n"
    parts = [_METHODS, machines, _wins(records)]
    parts.append(f"![{_PLOT}]({METHODS_PLOT.rpartition('/')[2]})\n")
    for learners in methods_table.LEARNERS:
        parts.append(f"## {learners} learners\n\n{methods_table.markdown(records, learners)}")
        missing = [
            name
            for name, runs in methods_table.GROUPS.items()
            if name.endswith(f"_{learners}") and not all(records.get(run.name) for run in runs)
        ]
        if missing:
            parts.append(f"This command does the missing runs:\n\n```\n{command(missing)}\n```\n")
    return "\n".join(parts)


def _timed_on(records: Records) -> str:
    timed = [
        record
        for run_records in records.values()
        for record in run_records
        if "encode_ms" in record
    ]
    machines = ", ".join(dict.fromkeys(record["processor"] for record in timed))
    if not timed:
        return ""
    return (
        f" The times of encoding and decoding are from {machines}. "
        "They are those of compiled steps, on one thread."
    )


def _method_records(records: Records) -> Records:
    names = {run.name for runs in methods_table.GROUPS.values() for run in runs}
    return {name: run_records for name, run_records in records.items() if name in names}


def _wins(records: Records) -> str:
    counts, setups = methods_table.wins(records)
    best = {name: count for name, count in counts.items() if count}
    nowhere = ", ".join(f"`{name}`" for name in counts if name not in best)
    if not setups:
        return "No setup has been measured with all methods yet.\n"
    ranked = sorted(best, key=lambda name: -best[name])
    named = ", ".join(f"`{name}` in {best[name]}" for name in ranked)
    return f"**Bold in {setups} setups:** {named}. In none: {nowhere}.\n"
