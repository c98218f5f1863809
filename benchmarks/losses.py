"""Where compression loses: counts over the recorded steps, and the error of the predicted steps.

`publish.py` puts the tables into docs/benchmarks/worth_it.md.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from output import table, times
from setups import CASTS, Setup, Trial, trials
from turns import AUTO
from worth_it import METHOD, NAMES

import tf_gradcomp as gc
from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.advice.probe import trains_like_dense
from tf_gradcomp.exchange.setup import Candidate

BEST_CAST = "best 16 bits"
_ADAM = Preconditioner(beta_2=0.999, epsilon=1e-7)
_TRAINS = {True: "yes", False: "no", None: "not measured"}


@dataclasses.dataclass
class Score:
    """The speed-ups of a method's steps over a baseline, one for each setup.

    Attributes:
        dense: Over the best uncompressed step.
        cast: Over the best step with 16 bits.
        fully_used: Over an ideal uncompressed step.
    """

    dense: list[float] = dataclasses.field(default_factory=list)
    cast: list[float] = dataclasses.field(default_factory=list)
    fully_used: list[float] = dataclasses.field(default_factory=list)


def scores(setups: Sequence[Setup]) -> dict[str, Score]:
    """The score of the best 16-bit casts and of each method.

    `auto` is left out: when it was measured, ScaleCom was one of its candidates.
    """
    found: dict[str, Score] = {}
    for setup in setups:
        cast = setup.fastest(CASTS)
        names = {name: name for name in setup.methods if name != AUTO}
        for label, name in {**({BEST_CAST: cast} if cast else {}), **names}.items():
            score, seconds = found.setdefault(label, Score()), setup.seconds(name)
            score.dense.append(setup.dense / seconds)
            score.fully_used.append(setup.fully_used / seconds)
            if cast and name != cast:
                score.cast.append(setup.seconds(cast) / seconds)
    return found


def total(setups: Sequence[Setup]) -> str:
    """A sentence that counts the losses of the methods."""
    every = [score for name, score in scores(setups).items() if name != BEST_CAST]
    ratios = [ratio for score in every for ratio in score.dense]
    lost = sum(ratio < 1 for ratio in ratios)
    jobs, links = ({getattr(setup, key) for setup in setups} for key in ("job", "link"))
    return (
        f"A compressed step was slower than the best uncompressed step in {lost} of {len(ratios)} "
        f"comparisons. They are from {len(setups)} setups of {len(jobs)} jobs and {len(links)} "
        "links."
    )


_COUNT = (
    "method",
    "slower than uncompressed",
    "slower than 16 bits",
    "slower than an ideal step",
    "times faster: least",
    "median",
    "most",
    "trains like uncompressed",
)


def count(setups: Sequence[Setup]) -> list[str]:
    """The lines of a table of each method's losses, and its speed-ups over uncompressed steps."""
    return table(_COUNT, (_counted(name, score) for name, score in scores(setups).items()))


def _counted(name: str, score: Score) -> list[str]:
    speed_ups = min(score.dense), statistics.median(score.dense), max(score.dense)
    return [
        name,
        *(losses(ratios) for ratios in (score.dense, score.cast, score.fully_used)),
        *map(times, speed_ups),
        _trains(name),
    ]


def losses(ratios: Sequence[float]) -> str:
    """The number of ratios below 1, and the number of ratios."""
    return f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}" if ratios else ""


def _trains(name: str) -> str:
    if name not in gc.compressors.names():
        return ""
    return _TRAINS[trains_like_dense(Candidate(gc.compressors.get(name), _ADAM))]


_STEP = ("step", "workers", "link")
_TIMES = ("uncompressed, ms", "16 bits, ms", "AdaComp, ms", "no network, ms")


def steps(setups: Sequence[Setup]) -> list[str]:
    """The lines of a table of the times of steps."""
    rows = []
    for setup in setups:
        cast = setup.fastest(CASTS)
        found = (setup.dense, setup.seconds(cast) if cast else None, setup.seconds(METHOD))
        cells = ("" if s is None else f"{1e3 * s:,.0f}" for s in (*found, setup.compute))
        rows.append([NAMES[setup.job], str(setup.workers), setup.link, *cells])
    return table((*_STEP, *_TIMES), rows)


_TRIAL = ("predicted", "steps", "median error", "within 20 %", "largest error", "of")


def held_out(setups: Sequence[Setup]) -> list[str]:
    """The errors of the step-time model on setups that it was not fitted on."""
    return table(_TRIAL, map(_tried, trials(setups)))


def _tried(trial: Trial) -> Iterator[str]:
    (method, where), error = trial.worst
    yield from (trial.tested, str(len(trial.errors)), f"{trial.median:.0%}", str(trial.close))
    yield from (f"{error:+.0%}", f"{method}, {where.partition(',')[0]}")
