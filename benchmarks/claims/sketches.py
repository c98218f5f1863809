"""The claims of the papers on count sketches."""

from __future__ import annotations

from methods_table import run_of

from claims.claim import POINT, Claim, Outcome, Paper, Results, mean_behind, points, ratio


def _level(results: Results) -> Outcome:
    gap, fewer = mean_behind(results, "sketch"), ratio(results, "sketch")
    return Outcome(
        gap <= POINT and fewer >= 40,
        f"{fewer:.0f} times, {gap:+.1f} points",
        f"Dense training reached {points(results, 'dense', 1)} %; {POINT:g} point was allowed.",
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
            ran="The digits network, Adam, 8 learners, 440 steps, `count_sketch` with its "
            "defaults.",
            runs={
                "dense": run_of("digits", 8, "no_compression"),
                "sketch": run_of("digits", 8, "count_sketch"),
            },
            check=_level,
        ),
    ],
)
