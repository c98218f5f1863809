"""The claims of the papers on count sketches."""

from __future__ import annotations

from methods_table import run_of

from claims.claim import (
    FAIR,
    POINT,
    Claim,
    Outcome,
    Paper,
    Results,
    apart,
    mean_behind,
    points,
    ratio,
    within,
)

TIMES = 40
DENSITY = 0.0014  # so that the ratio is just above that


def _level(results: Results) -> Outcome:
    gap, fewer = mean_behind(results, "sketch"), ratio(results, "sketch")
    level = within(gap)
    if level:
        holds: bool | None = fewer >= TIMES
    else:
        holds = level if fewer <= FAIR * TIMES else None
    return Outcome(
        holds,
        f"{fewer:.0f} times; {points(results, 'dense', 1)} and {points(results, 'sketch', 1)} %",
        f"It is {apart(gap)} dense, and {POINT:g} point was allowed. The paper's ratio is {TIMES}; "
        f"a failure at a ratio above {FAIR * TIMES:.0f} decides nothing.",
    )


PAPER = Paper(
    "Count sketches",
    "Ivkin et al., NeurIPS 2019, [arXiv 1903.04488](https://arxiv.org/abs/1903.04488); Xian et "
    "al., ICDM 2022, [arXiv 2210.07454](https://arxiv.org/abs/2210.07454)",
    [
        Claim(
            "sketches/accuracy",
            "Sketched-SGD sends up to 40 times less and trains as well; SketchedAMSGrad's abstract "
            "has no figure.",
            "40 times, level",
            recalled=True,
            ran="The digits network, Adam, 8 learners, 440 steps, `count_sketch` with a density of "
            f"{DENSITY}, which sends about {TIMES} times fewer bytes.",
            runs={
                "dense": run_of("digits", 8, "no_compression"),
                "sketch": run_of("digits", 8, f"count_sketch(density={DENSITY})"),
            },
            check=_level,
        ),
    ],
)
