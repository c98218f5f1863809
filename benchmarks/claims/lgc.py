"""The claims of LGC's paper."""

from __future__ import annotations

from simulated import Training

from claims.claim import (
    POINT,
    Claim,
    Outcome,
    Paper,
    Results,
    all_hold,
    behind_or_ahead,
    compressed,
    last_ratio,
    mean_behind,
    points,
    ratio,
    within,
)

DENSITY = 0.01
RATE = round(1 / DENSITY)
FEW_BITS = (
    f"scalecom(rates={{'convolution': {RATE}, 'dense': {RATE}, 'vector': None}}, value_bits=8, "
    "overrides={'(^|/)conv2d/': None})"  # LGC sends the first layer and vectors dense, too
)
LEARNED = f"lgc(density={DENSITY}, dense_steps=44, training_steps=132)"
DIGITS = Training("digits", 1, 0, 440, optimizer="sgd", knows_layers=True)


def _accuracy(results: Results) -> Outcome:
    gap = mean_behind(results, "LGC")
    return Outcome(
        within(gap),
        f"{points(results, 'dense', 1)} and {points(results, 'LGC', 1)} %",
        f"LGC is {behind_or_ahead(gap)} dense training. Required: at most {POINT:g} point behind.",
    )


def _equal_bytes(results: Results) -> Outcome:
    ahead = mean_behind(results, "ScaleCom, 8 bits", "LGC")
    ends = [ratio(results, label, last_ratio) for label in ("LGC", "ScaleCom, 8 bits")]
    whole = [ratio(results, label) for label in ("LGC", "ScaleCom, 8 bits")]
    return Outcome(
        all_hold(ends[0] > ends[1], within(-ahead)),
        f"{ends[0]:.0f} and {ends[1]:.0f} times at the end",
        f"LGC is {behind_or_ahead(-ahead)} CLT-k with values of 8 bits. Required: LGC has the "
        f"larger ratio, and is at most {POINT:g} point behind. In the whole run, LGC's ratio is "
        f"{whole[0]:.0f}, because it begins with dense steps, and CLT-k's is {whole[1]:.0f}.",
    )


PAPER = Paper(
    "LGC",
    "Abrahamyan et al., TNNLS 33(12), [arXiv 2103.08870](https://arxiv.org/abs/2103.08870)",
    [
        Claim(
            "lgc/few_bits",
            "LGC compresses significantly more than DGC and ScaleCom. (The paper does not compare "
            "it with methods that send values of few bits.)",
            "more than ScaleCom",
            recalled=False,
            ran="The digits network, SGD with momentum, 4 learners, 440 steps, a density of 1 %; "
            "ScaleCom (CLT-k) has values of 8 bits, which take as many bytes as LGC's codes.",
            runs={
                "LGC": compressed(DIGITS, 4, LEARNED),
                "ScaleCom, 8 bits": compressed(DIGITS, 4, FEW_BITS),
            },
            check=_equal_bytes,
        ),
        Claim(
            "lgc/accuracy",
            "ResNet101 on CIFAR10 reaches 93.57 %, which is 0.18 points less than with dense "
            "training.",
            "0.18 points less",
            recalled=False,
            ran="LGC's run of the claim above, and dense training. The paper's network and data "
            "are not available here.",
            runs={"dense": DIGITS, "LGC": compressed(DIGITS, 4, LEARNED)},
            check=_accuracy,
        ),
        Claim(
            "lgc/imagenet_and_camvid",
            "ResNet50 on ImageNet and PSPNet on CamVid train with LGC.",
            "trained",
            recalled=False,
            cannot="ImageNet, CamVid and the paper's tables are not available here.",
        ),
    ],
)
