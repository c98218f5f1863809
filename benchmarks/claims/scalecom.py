"""The claims of the papers on ScaleCom, and on LGC, which is compared with it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from simulated import Training

from claims.claim import (
    DENSE,
    POINT,
    Claim,
    Outcome,
    Paper,
    Results,
    accuracies,
    all_hold,
    behind_or_ahead,
    compressed,
    last_ratio,
    later_bytes,
    later_ratio,
    mean_behind,
    points,
    qualities,
    ratio,
    within,
)

ALIKE_BY = 0.05  # by which a distance varies with the seed, and in the second half of a run
CHANCE = 20.0  # %; of ten digits, guessing finds 10
MNIST_POINT = 0.3  # of 10,000 images: twice the deviation of a difference
SAME = 1.1  # times as many bytes
LOWEST = 65  # the lowest ratio that the paper has

DIGITS = Training("digits", 1, 0, 440, optimizer="sgd", knows_layers=True)
LARGE = Training("mnist", 1, 0, 120, optimizer="sgd", batch_size=1024, rate=1.5, knows_layers=True)
WARMUP = 11  # the warm-up is one in so many of the steps: less than a tenth, as in the paper
BETAS = (1.0, 0.1)
AT_ONCE = ", without warm-up"
WITHOUT_WARMUP = {1.0: "scalecom", 0.1: "scalecom(beta=0.1)"}
DENSITY = 0.01
RATE = round(1 / DENSITY)
FEW_BITS = (
    f"scalecom(rates={{'convolution': {RATE}, 'dense': {RATE}, 'vector': None}}, value_bits=8, "
    "overrides={'(^|/)conv2d/': None})"  # LGC sends the first layer and vectors dense, too
)
LEARNED = f"lgc(density={DENSITY}, warmup_steps=44, training_steps=132)"
SCALED = 2.0  # times the learning rate; at 8 times, uncompressed training diverges, too


def scalecom(steps: int, beta: float = 1.0) -> str:
    """Returns ScaleCom after the paper's warm-up, in a run of so many steps."""
    return f"scalecom(beta={beta:g}, warmup_steps={steps // WARMUP})"


def _alike(rate: float, beta: float = 1.0) -> Training:
    method = scalecom(DIGITS.steps, beta)
    return dataclasses.replace(compressed(DIGITS, 8, method), rate=rate, similarity=True)


def _at_once(training: Training, beta: float) -> Training:
    """Returns a training of ScaleCom from the first step on."""
    return dataclasses.replace(training, compressor=WITHOUT_WARMUP[beta])


def _without(results: Results, labels: Sequence[str]) -> str:
    reached = (points(results, f"{label}{AT_ONCE}", 1) for label in labels)
    return f"Without the warm-up, {' and '.join(labels)} reached {' and '.join(reached)} %."


def _flat(results: Results) -> Outcome:
    labels = ("8 workers", "64 workers")
    few, many = (later_bytes(results, label) for label in labels)
    worst = max(mean_behind(results, label) for label in labels)
    ratios = [ratio(results, label, later_ratio) for label in labels]
    return Outcome(
        all_hold(many <= SAME * few, min(ratios) >= LOWEST, within(worst)),
        {
            **accuracies(results, DENSE),
            **{
                label: f"{points(results, label, 1)} % at {ratio:.0f} times"
                for label, ratio in zip(labels, ratios, strict=True)
            },
        },
        "In the second half of the run, each of 8 "
        f"workers sends {few:,.0f} bytes in a step, and each of 64 workers {many:,.0f}. The "
        f"worse accuracy is {behind_or_ahead(worst)} uncompressed training. Required: a ratio of "
        f"at least "
        f"{LOWEST}, and at most {POINT:g} point behind.",
    )


def _distance(results: Results, label: str) -> float:
    """Returns the mean cosine distance in the second half of the run."""
    halves = [record["cosine_distance"] for record in results[label]]
    return statistics.mean(statistics.mean(half[len(half) // 2 :]) for half in halves)


def _larger(distance: float, reference: float, margin: float) -> bool | None:
    """Returns whether a distance is larger than another one; None if they are about equal."""
    return None if abs(distance - reference) < margin else distance > reference


def _similarity(results: Results) -> Outcome:
    labels = ("beta = 1", "beta = 0.1")
    low, high, filtered = (_distance(results, label) for label in ("low", *labels))
    margin = ALIKE_BY / math.sqrt(len(results["low"]))  # of the mean over seeds
    scaled = {label: points(results, label, 1) for label in labels}
    trained = all(min(qualities(results, label)) > CHANCE for label in scaled)
    larger = (_larger(high, low, margin), _larger(high, filtered, margin))
    return Outcome(
        all_hold(*larger) if trained else None,
        {"low rate": f"{low:.2f}", labels[0]: f"{high:.2f}", labels[1]: f"{filtered:.2f}"},
        "Required: at the scaled rate and beta = 1, the distance is larger than at the low rate, "
        "and larger than with beta = 0.1. At the scaled rate, uncompressed training reached "
        f"{points(results, 'dense', 1)} %, beta = 1 {scaled['beta = 1']} %, and beta = 0.1 "
        f"{scaled['beta = 0.1']} %. A difference of less than {margin:.2f} decides nothing, and "
        "neither does a run that is hardly better than guessing. "
        f"{_without(results, labels)}",
    )


def _overlap(results: Results) -> Outcome:
    curve = results["low"][0]["hamming_distance"]
    missed = statistics.mean(curve[len(curve) // 2 :])
    return Outcome(
        missed <= 0.8,
        {"share": f"{missed:.2f}"},
        "This is the share of the leader's entries that are not among the largest entries of the "
        "sum, in the second half of the run. A smaller share is better. Required: at most 0.8.",
    )


def _beta(results: Results) -> Outcome:
    labels = ("beta = 1", "beta = 0.1")
    plain, filtered = (mean_behind(results, label) for label in labels)
    return Outcome(
        all_hold(filtered <= MNIST_POINT < plain),
        accuracies(results, DENSE, *labels, digits=2),
        f"beta = 1 is {behind_or_ahead(plain, 2)} uncompressed training, and beta = 0.1 is "
        f"{behind_or_ahead(filtered, 2)} it. Required: beta = 1 is more than {MNIST_POINT} points "
        "behind, and beta = 0.1 is not.",
    )


def _ran_warm_up(steps: int) -> str:
    return f"a uncompressed warm-up of {steps // WARMUP} steps"


def _learners(name: str, compressor: str, begins: str) -> Claim:
    return Claim(
        name,
        "ScaleCom compresses 65 to 400 times with up to 64 workers, without a significant loss of "
        "accuracy, and the ratio does not fall with more workers.",
        checked=True,
        ran="The digits network with 8 and 64 workers, SGD with momentum, batches of 64, "
        f"{DIGITS.steps} steps, the paper's rates by layer, and {begins}.",
        runs={
            "dense": DIGITS,
            **{f"{count} workers": compressed(DIGITS, count, compressor) for count in (8, 64)},
        },
        check=_flat,
    )


def _large_batch(name: str, compressors: Mapping[float, str], begins: str) -> Claim:
    return Claim(
        name,
        "With a scaled batch and learning rate, beta = 1 loses accuracy, and beta = 0.1 does not.",
        checked=False,
        ran="The digits network on MNIST, SGD with momentum, batches of 1,024, 1.5 times the "
        f"learning rate, 32 workers, {LARGE.steps} steps, and {begins}.",
        runs={
            "dense": LARGE,
            **{
                f"beta = {beta:g}": compressed(LARGE, 32, method)
                for beta, method in compressors.items()
            },
        },
        check=_beta,
    )


PAPER = Paper(
    "ScaleCom",
    "Chen et al., NeurIPS 2020, [arXiv 2104.11125](https://arxiv.org/abs/2104.11125). The paper "
    "begins with uncompressed gradients, for 1 to 5 epochs and less than a tenth of the training "
    "(recalled). Runs without this warm-up came first, and did not reproduce the claims. So claims "
    "were run again with a warm-up of an eleventh of the steps.",
    [
        _learners("scalecom/learners", "scalecom", "compression from the first step on"),
        _learners("scalecom/learners_warm_up", scalecom(DIGITS.steps), _ran_warm_up(DIGITS.steps)),
        Claim(
            "scalecom/similarity",
            "The cosine distance between the workers' memories falls at a learning rate of 0.01, "
            "stays high at a scaled rate, and falls again with beta = 0.1 (ResNet18, CIFAR10).",
            checked=False,
            ran=f"The digits network, SGD with momentum, 8 workers, {DIGITS.steps} steps, and "
            f"{_ran_warm_up(DIGITS.steps)}. The learning rates are 0.01, 0.1, and 0.1 with "
            "beta = 0.1.",
            runs={
                "dense": dataclasses.replace(DIGITS, rate=SCALED),
                "low": _alike(0.2),
                **{f"beta = {beta:g}": _alike(SCALED, beta) for beta in BETAS},
                **{f"beta = {beta:g}{AT_ONCE}": _at_once(_alike(SCALED), beta) for beta in BETAS},
            },
            check=_similarity,
        ),
        Claim(
            "scalecom/overlap",
            "Of the leader's entries, 0.6 to 0.8 are not among the largest of the mean over all.",
            checked=False,
            ran="The run at the low learning rate of the claim above.",
            runs={"low": _alike(0.2)},
            check=_overlap,
        ),
        _large_batch("scalecom/large_batch", WITHOUT_WARMUP, "compression from the first step on"),
        _large_batch(
            "scalecom/large_batch_warm_up",
            {beta: scalecom(LARGE.steps, beta) for beta in BETAS},
            _ran_warm_up(LARGE.steps),
        ),
        Claim(
            "scalecom/imagenet_wmt_and_speech",
            "ResNet18, ResNet50 and MobileNetV2 on ImageNet lose 0.1 to 0.6 points at 96 to 155 "
            "times; a Transformer on WMT14 and an LSTM on speech lose nothing.",
            checked=False,
            cannot="ImageNet, WMT14 and SWB300 are not available here.",
        ),
    ],
)


def _accuracy(results: Results) -> Outcome:
    gap = mean_behind(results, "LGC")
    return Outcome(
        within(gap),
        accuracies(results, DENSE, "LGC"),
        f"LGC is {behind_or_ahead(gap)} uncompressed training. Required: at most {POINT:g} point "
        f"behind.",
    )


def _equal_bytes(results: Results) -> Outcome:
    ahead = mean_behind(results, "ScaleCom, 8 bits", "LGC")
    ends = [ratio(results, label, last_ratio) for label in ("LGC", "ScaleCom, 8 bits")]
    run_ratios = [ratio(results, label) for label in ("LGC", "ScaleCom, 8 bits")]
    return Outcome(
        all_hold(ends[0] > ends[1], within(-ahead)),
        {
            "LGC": f"{ends[0]:.0f} times at the end",
            "ScaleCom with 8 bits": f"{ends[1]:.0f} times",
        },
        f"LGC is {behind_or_ahead(-ahead)} CLT-k with values of 8 bits. Required: LGC has the "
        f"larger ratio, and is at most {POINT:g} point behind. In the whole run, LGC's ratio is "
        f"{run_ratios[0]:.0f}, because it begins with uncompressed steps, and CLT-k's is "
        f"{run_ratios[1]:.0f}.",
    )


LGC = Paper(
    "LGC",
    "Abrahamyan et al., TNNLS 33(12), [arXiv 2103.08870](https://arxiv.org/abs/2103.08870)",
    [
        Claim(
            "lgc/few_bits",
            "LGC compresses significantly more than DGC and ScaleCom. (The paper does not compare "
            "it with methods that send values of few bits.)",
            checked=True,
            ran="The digits network, SGD with momentum, 4 workers, 440 steps, a density of 1 %; "
            "ScaleCom (CLT-k) has values of 8 bits, which take as many bytes as LGC's codes.",
            runs={
                "LGC": compressed(DIGITS, 4, LEARNED),
                "ScaleCom, 8 bits": compressed(DIGITS, 4, FEW_BITS),
            },
            check=_equal_bytes,
        ),
        Claim(
            "lgc/accuracy",
            "ResNet101 on CIFAR10 reaches 93.57 %, which is 0.18 points less than uncompressed "
            "training.",
            checked=True,
            ran="LGC's run of the claim above, and uncompressed training. The paper's network and "
            "data "
            "are not available here.",
            runs={"dense": DIGITS, "LGC": compressed(DIGITS, 4, LEARNED)},
            check=_accuracy,
        ),
        Claim(
            "lgc/imagenet_and_camvid",
            "ResNet50 on ImageNet and PSPNet on CamVid train with LGC.",
            checked=True,
            cannot="ImageNet, CamVid and the paper's tables are not available here.",
        ),
    ],
)
