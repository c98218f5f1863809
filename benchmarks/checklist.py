"""Tables of steps that the critics of gradient compression ask for, from the recorded results.

`publish.py` puts them into docs/benchmarks/checklist.md.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

import turns
from network_report import TITLES
from output import table, times
from records import Record
from setups import CASTS, DENSE, Setup, Trial, trials
from turns import AUTO

import tf_gradcomp as gc
from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.advice.probe import trains_like_dense
from tf_gradcomp.exchange.setup import Candidate

BEST_CAST = "best 16 bits"
_ADAM = Preconditioner(beta_2=0.999, epsilon=1e-7)
_TRAINS = {True: "yes", False: "no", None: "not measured"}


@dataclasses.dataclass
class Score:
    """The speed-ups of a method's steps over a baseline, one for each setup."""

    dense: list[float] = dataclasses.field(default_factory=list)
    cast: list[float] = dataclasses.field(default_factory=list)
    fully_used: list[float] = dataclasses.field(default_factory=list)


def scores(setups: Sequence[Setup]) -> dict[str, Score]:
    """Returns the score of the best 16-bit casts and of each method."""
    found: dict[str, Score] = {}
    for setup in setups:
        cast = setup.fastest(CASTS)
        names = {name: name for name in setup.methods}
        for label, name in {**({BEST_CAST: cast} if cast else {}), **names}.items():
            score, seconds = found.setdefault(label, Score()), setup.seconds(name)
            score.dense.append(setup.dense / seconds)
            score.fully_used.append(setup.fully_used / seconds)
            if cast and name != cast:
                score.cast.append(setup.seconds(cast) / seconds)
    return found


def total(setups: Sequence[Setup]) -> str:
    """Returns a sentence that counts the losses of the methods."""
    every = [score for name, score in scores(setups).items() if name not in (BEST_CAST, AUTO)]
    dense, cast, fully_used = (
        losses([ratio for score in every for ratio in getattr(score, name)])
        for name in ("dense", "cast", "fully_used")
    )
    return (
        f"In {len(setups)} setups of a job, workers and a link, {dense} steps with a method are "
        f"slower than the best dense step, {cast} are slower than the best step with 16 bits, and "
        f"{fully_used} than a dense step that fully uses its link and overlaps with computing."
    )


_COUNT = (
    "method",
    "slower than dense",
    "than 16 bits",
    "than dense on a fully used link",
    "times faster than dense",
    "than 16 bits",
    "trains like dense",
)


def count(setups: Sequence[Setup]) -> Iterator[str]:
    """Yields the lines that count the setups, and each method's losses in them."""
    several = {key: list(dict.fromkeys(getattr(s, key) for s in setups)) for key in _KEYS}
    of = ", ".join(f"{len(values)} {_KEYS[key]}" for key, values in several.items())
    yield f"**{len(setups)} setups were measured**: {of}."
    yield ""
    yield from table(_COUNT, (_counted(name, score) for name, score in scores(setups).items()))


_KEYS = {"job": "jobs", "workers": "numbers of workers", "link": "links"}


def _counted(name: str, score: Score) -> list[str]:
    return [
        name,
        *(losses(ratios) for ratios in (score.dense, score.cast, score.fully_used)),
        _range(score.dense),
        _range(score.cast),
        _trains(name),
    ]


def losses(ratios: Sequence[float]) -> str:
    """Returns the number of ratios below 1, and the number of ratios."""
    return f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}" if ratios else ""


def _range(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    low, middle, high = map(times, (min(ratios), statistics.median(ratios), max(ratios)))
    return f"{low} to {high}, median {middle}"


def _trains(name: str) -> str:
    if name not in gc.compressors.names() or name == AUTO:
        return ""
    return _TRAINS[trains_like_dense(Candidate(gc.compressors.get(name), _ADAM))]


_STEP = (
    "a step",
    "ms",
    "range",
    "encode",
    "decode",
    "times faster than dense",
    "than 16 bits",
    "than a fully used link",
    "of a free network's speed",
)


def steps(setups: Sequence[Setup]) -> Iterator[str]:
    """Yields the lines of a table for each setup, the fastest step first."""
    for setup in setups:
        yield ""
        yield f"### {TITLES[setup.job]}, {setup.workers} workers, {setup.link}"
        yield ""
        yield f"The link carried {setup.speed:,.0f} Mbit/s."
        yield ""
        yield from table(_STEP, _rows(setup))


def _rows(setup: Setup) -> Iterator[list[str]]:
    dense, cast = setup.fastest(DENSE), setup.fastest(CASTS)
    rows: dict[str, tuple[float, Record | None]] = {
        label: (setup.seconds(name), setup.records[name])
        for name, label in {
            dense: f"best dense: {dense}",
            cast: f"{BEST_CAST}: {cast}",
            **{name: name for name in setup.methods},
        }.items()
        if name
    }
    rows["dense on a fully used link"] = setup.fully_used, None
    rows["free network"] = setup.compute, None
    for label, (seconds, record) in sorted(rows.items(), key=lambda row: row[1][0]):
        yield [
            label,
            f"{1e3 * seconds:.1f}",
            *_measured(record),
            times(setup.dense / seconds),
            times(setup.seconds(cast) / seconds) if cast else "",
            times(setup.fully_used / seconds),
            "" if setup.job == turns.EXCHANGE else f"{setup.compute / seconds:.0%}",
        ]


def _measured(record: Record | None) -> list[str]:
    """Returns the range of a step's times, and of encoding and decoding times, in milliseconds."""
    if record is None:
        return ["", "", ""]
    low, high = min(record["seconds"]), max(record["seconds"])
    stages = record["stages"]
    parts = [f"{1e3 * stages[name]:.1f}" for name in ("encode", "decode")] if stages else ["", ""]
    return [f"{1e3 * low:.1f} to {1e3 * high:.1f}", *parts]


_TRIAL = ("fitted on", "tested on", "steps", "median error", "within 20 %", "largest error")


def held_out(setups: Sequence[Setup]) -> list[str]:
    """The errors of the step-time model on setups that it was not fitted on."""
    return table(_TRIAL, map(_tried, trials(setups)))


def _tried(trial: Trial) -> list[str]:
    (method, where), error = trial.worst
    return [
        trial.fitted,
        trial.tested,
        str(len(trial.errors)),
        f"{trial.median:.0%}",
        str(trial.close),
        f"{error:+.0%}: {method}, {where}",
    ]
