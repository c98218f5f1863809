"""The claims of SIDCo's paper."""

from __future__ import annotations

from methods_table import run_of

from claims.claim import (
    POINT,
    Claim,
    Outcome,
    Paper,
    Results,
    apart,
    by,
    every,
    mean_behind,
    points,
    ratio,
    within,
)

RUN = run_of("digits", 8, "sidco")


def _like_top_k(results: Results) -> Outcome:
    gap = mean_behind(results, "SIDCo", "top-k")
    given = ratio(results, "top-k") / ratio(results, "SIDCo")
    return Outcome(
        every(within(gap), 0.75 <= given <= 1.25),
        f"{points(results, 'top-k', 1)} and {points(results, 'SIDCo', 1)} %, {given:.2f} times",
        f"SIDCo is {apart(gap)} top-k with {given:.2f} times the bytes; {POINT:g} "
        "point and 0.75 to 1.25 times were allowed.",
    )


PAPER = Paper(
    "SIDCo",
    "Abdelmoniem et al., MLSys 2021, [arXiv 2101.10761](https://arxiv.org/abs/2101.10761)",
    [
        Claim(
            "sidco/threshold",
            "The estimated threshold sends about as many entries as top-k, which train as well.",
            "like top-k",
            recalled=False,
            ran="The digits network, Adam, 8 learners, 440 steps, a density of 0.001.",
            runs={"SIDCo": RUN, "top-k": by(RUN, 8, "top_k(density=0.001)")},
            check=_like_top_k,
        ),
        Claim(
            "sidco/speed",
            "Training is up to 41.7 times faster than without compression, and 7.6 times faster "
            "than with top-k.",
            "41.7 and 7.6 times",
            recalled=False,
            cannot="The figures are for a cluster of GPUs; benchmarks/kernels.py times SIDCo here.",
        ),
    ],
)
