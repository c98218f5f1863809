"""The claims of ACP-SGD's paper."""

from __future__ import annotations

from methods_table import ALTERNATING, run_of

from claims.claim import (
    POINT,
    Claim,
    Outcome,
    Paper,
    Results,
    apart,
    every,
    mean_behind,
    ratio,
    within,
)


def _halved(results: Results) -> Outcome:
    gap = mean_behind(results, "alternating", "both factors")
    fewer = ratio(results, "alternating") / ratio(results, "both factors")
    return Outcome(
        every(fewer >= 1.8, within(gap)),
        f"{fewer:.2f} times, {gap:+.1f} points",
        f"It is {apart(gap)} PowerSGD with both factors. At least 1.8 times fewer bytes and at "
        f"most {POINT:g} point were asked for.",
    )


PAPER = Paper(
    "ACP-SGD",
    "Zhang et al., ICDCS 2023",
    [
        Claim(
            "acp_sgd/bytes",
            "In turns, one factor is sent: half of PowerSGD's bytes at equal rank and accuracy.",
            "2 times, level",
            recalled=True,
            ran="The digits network, Adam, 8 learners, 440 steps, rank 4.",
            runs={
                "both factors": run_of("digits", 8, "power_sgd"),
                "alternating": run_of("digits", 8, ALTERNATING),
            },
            check=_halved,
        ),
        Claim(
            "acp_sgd/speed",
            "Training is 1.43 times faster than with PowerSGD, on average from 1 to 100 Gbit/s.",
            "1.43 times",
            recalled=False,
            cannot="The figure is for 8 to 64 GPUs.",
        ),
    ],
)
