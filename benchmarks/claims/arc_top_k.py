"""The claims of ARC-Top-K's paper."""

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
    mean_behind,
    points,
    within,
)

RUN = run_of("digits", 8, "arc_top_k")


def _like_top_k(results: Results) -> Outcome:
    gap = mean_behind(results, "ARC-Top-K", "top-k")
    return Outcome(
        within(gap),
        f"{points(results, 'top-k', 1)} and {points(results, 'ARC-Top-K', 1)} %",
        f"ARC-Top-K is {apart(gap)} top-k; {POINT:g} was allowed.",
    )


PAPER = Paper(
    "ARC-Top-K",
    "Chen et al., 2025, [arXiv 2510.26709](https://arxiv.org/abs/2510.26709)",
    [
        Claim(
            "arc_top_k/accuracy",
            "It is as accurate as top-k, with sums in place of a gather.",
            "like top-k",
            recalled=False,
            ran="The digits network, Adam, 8 learners, 440 steps, a density of 2 % in both.",
            runs={"ARC-Top-K": RUN, "top-k": by(RUN, 8, "top_k(density=0.02)")},
            check=_like_top_k,
        ),
        Claim(
            "arc_top_k/speed",
            "Training takes up to 60.7 % less time.",
            "60.7 %",
            recalled=False,
            cannot="The figure is for GPUs, and the abstract does not say what it is less than.",
        ),
    ],
)
