"""The claims of the paper on quantization whose codes are summed."""

from __future__ import annotations

from methods_table import run_of

from claims.claim import (
    IMAGE,
    POINT,
    Claim,
    Outcome,
    Paper,
    Results,
    by,
    every,
    mean_behind,
    within,
)

DENSE, FOUR = (run_of("digits", 2, method) for method in ("no_compression", "max_norm"))


def _bits(results: Results) -> Outcome:
    four, two = (mean_behind(results, label) for label in ("4 bits", "2 bits"))
    return Outcome(
        every(within(four), two - four > IMAGE),
        f"{four:+.1f} and {two:+.1f} points",
        f"With 4 bits, {POINT:g} point behind dense was allowed; 2 bits must be further behind "
        "by more than an image.",
    )


PAPER = Paper(
    "Max-norm quantization",
    "Vineeth S, 2021, [arXiv 2109.12497](https://arxiv.org/abs/2109.12497)",
    [
        Claim(
            "max_norm/bits",
            "ResNet50 on CIFAR10 is 0.9 points behind dense with 4 bits and 2 workers, and 3.7 "
            "with 2 bits (the author's logs).",
            "0.9 and 3.7 points",
            recalled=False,
            ran="The digits network, Adam, 2 learners, 440 steps. Here, what rounding takes off "
            "stays in a residual, and each variable has a scale.",
            runs={"dense": DENSE, "4 bits": FOUR, "2 bits": by(FOUR, 2, "max_norm(bits=2)")},
            check=_bits,
        ),
    ],
)
