"""The claims of papers whose runs are those of the table of all methods, on digits."""

from __future__ import annotations

from methods_table import ALTERNATING, run_of

from claims.claim import (
    FAIR,
    IMAGE,
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

SIDCO = run_of("digits", 8, "sidco")
MAX_NORM = run_of("digits", 2, "max_norm")
ARC_TOP_K = run_of("digits", 8, "arc_top_k")
TIMES = 40
DENSITY = 0.0014  # of the sketch, so that the ratio is just above that


def _arc_top_k(results: Results) -> Outcome:
    gap = mean_behind(results, "ARC-Top-K", "top-k")
    return Outcome(
        within(gap),
        f"{points(results, 'top-k', 1)} and {points(results, 'ARC-Top-K', 1)} %",
        f"ARC-Top-K is {apart(gap)} top-k; {POINT:g} was allowed.",
    )


def _sidco(results: Results) -> Outcome:
    gap = mean_behind(results, "SIDCo", "top-k")
    given = ratio(results, "top-k") / ratio(results, "SIDCo")
    return Outcome(
        every(within(gap), 0.75 <= given <= 1.25),
        f"{points(results, 'top-k', 1)} and {points(results, 'SIDCo', 1)} %, {given:.2f} times",
        f"SIDCo is {apart(gap)} top-k with {given:.2f} times the bytes; {POINT:g} "
        "point and 0.75 to 1.25 times were allowed.",
    )


def _sketch(results: Results) -> Outcome:
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


def _halved(results: Results) -> Outcome:
    gap = mean_behind(results, "alternating", "both factors")
    fewer = ratio(results, "alternating") / ratio(results, "both factors")
    return Outcome(
        every(fewer >= 1.8, within(gap)),
        f"{fewer:.2f} times, {gap:+.1f} points",
        f"It is {apart(gap)} PowerSGD with both factors. At least 1.8 times fewer bytes and at "
        f"most {POINT:g} point were asked for.",
    )


def _bits(results: Results) -> Outcome:
    four, two = (mean_behind(results, label) for label in ("4 bits", "2 bits"))
    return Outcome(
        every(within(four), two - four > IMAGE),
        f"{four:+.1f} and {two:+.1f} points",
        f"With 4 bits, {POINT:g} point behind dense was allowed; 2 bits must be further behind "
        "by more than an image.",
    )


PAPERS = (
    Paper(
        "SIDCo",
        "Abdelmoniem et al., MLSys 2021, [arXiv 2101.10761](https://arxiv.org/abs/2101.10761)",
        [
            Claim(
                "sidco/threshold",
                "The estimated threshold sends about as many entries as top-k, which train as "
                "well.",
                "like top-k",
                recalled=False,
                ran="The digits network, Adam, 8 learners, 440 steps, a density of 0.001.",
                runs={"SIDCo": SIDCO, "top-k": by(SIDCO, 8, "top_k(density=0.001)")},
                check=_sidco,
            ),
            Claim(
                "sidco/speed",
                "Training is up to 41.7 times faster than without compression, and 7.6 times "
                "faster than with top-k.",
                "41.7 and 7.6 times",
                recalled=False,
                cannot="The figures are for a cluster of GPUs; benchmarks/kernels.py times SIDCo "
                "here.",
            ),
        ],
    ),
    Paper(
        "Max-norm quantization",
        "Vineeth S, 2021, [arXiv 2109.12497](https://arxiv.org/abs/2109.12497)",
        [
            Claim(
                "max_norm/bits",
                "ResNet50 on CIFAR10 is 0.9 points behind dense with 4 bits and 2 workers, and 3.7 "
                "with 2 bits (the author's logs).",
                "0.9 and 3.7 points",
                recalled=False,
                ran="The digits network, Adam, 2 learners, 440 steps. Here, what rounding takes "
                "off stays in a residual, and each variable has a scale.",
                runs={
                    "dense": run_of("digits", 2, "no_compression"),
                    "4 bits": MAX_NORM,
                    "2 bits": by(MAX_NORM, 2, "max_norm(bits=2)"),
                },
                check=_bits,
            ),
        ],
    ),
    Paper(
        "ACP-SGD",
        "Zhang et al., ICDCS 2023",
        [
            Claim(
                "acp_sgd/bytes",
                "In turns, one factor is sent: half of PowerSGD's bytes at equal rank and "
                "accuracy.",
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
                "Training is 1.43 times faster than with PowerSGD, on average from 1 to 100 "
                "Gbit/s.",
                "1.43 times",
                recalled=False,
                cannot="The figure is for 8 to 64 GPUs.",
            ),
        ],
    ),
    Paper(
        "ARC-Top-K",
        "Chen et al., 2025, [arXiv 2510.26709](https://arxiv.org/abs/2510.26709)",
        [
            Claim(
                "arc_top_k/accuracy",
                "It is as accurate as top-k, with sums in place of a gather.",
                "like top-k",
                recalled=False,
                ran="The digits network, Adam, 8 learners, 440 steps, a density of 2 % in both.",
                runs={"ARC-Top-K": ARC_TOP_K, "top-k": by(ARC_TOP_K, 8, "top_k(density=0.02)")},
                check=_arc_top_k,
            ),
            Claim(
                "arc_top_k/speed",
                "Training takes up to 60.7 % less time.",
                "60.7 %",
                recalled=False,
                cannot="The figure is for GPUs, and the abstract does not say what it is less "
                "than.",
            ),
        ],
    ),
    Paper(
        "Count sketches",
        "Ivkin et al., NeurIPS 2019, [arXiv 1903.04488](https://arxiv.org/abs/1903.04488); Xian et "
        "al., ICDM 2022, [arXiv 2210.07454](https://arxiv.org/abs/2210.07454)",
        [
            Claim(
                "sketches/accuracy",
                "Sketched-SGD sends up to 40 times less and trains as well; SketchedAMSGrad's "
                "abstract has no figure.",
                "40 times, level",
                recalled=True,
                ran="The digits network, Adam, 8 learners, 440 steps, `count_sketch` with a "
                f"density of {DENSITY}, which sends about {TIMES} times fewer bytes.",
                runs={
                    "dense": run_of("digits", 8, "no_compression"),
                    "sketch": run_of("digits", 8, f"count_sketch(density={DENSITY})"),
                },
                check=_sketch,
            ),
        ],
    ),
)
