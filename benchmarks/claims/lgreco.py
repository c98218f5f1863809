"""The claims of L-GreCo's paper, and those of the methods that it plans."""

from __future__ import annotations

import functools

from simulated import Training

from claims.claim import (
    DENSE,
    Claim,
    Outcome,
    Paper,
    Results,
    accuracies,
    all_hold,
    behind_or_ahead,
    compressed,
    later_ratio,
    mean_behind,
    points,
    ratio,
    within,
)

WITHIN = 1.0  # % of the uncompressed accuracy: the paper's criterion
PART = 0.5  # of what the paper saves
DIGITS = Training("digits", 1, 0, 440, optimizer="sgd")
LABELS = ("uniform", "bound", "planned")
FAMILIES = {  # the default, and the bound of what plans choose from
    "qsgd": ("qsgd(bits=4)", "qsgd(bits=2)"),
    "top_k": ("top_k(density=0.01)", "top_k(density=0.001)"),
    "power_sgd": ("power_sgd(rank=4)", "power_sgd(rank=2)"),
}


def runs_of(family: str) -> dict[str, Training]:
    """Returns uncompressed training, the uniform setting, the bound, and plans."""
    uniform, bound = FAMILIES[family]
    methods = dict(zip(LABELS, (uniform, bound, f"lgreco(method='{uniform}')"), strict=True))
    runs = {label: compressed(DIGITS, 4, text) for label, text in methods.items()}
    return {"dense": DIGITS, **runs}


def _fewer(gain: float, results: Results) -> Outcome:
    uniform, bound, planned = (ratio(results, label, later_ratio) for label in LABELS)
    allowed = WITHIN / 100 * results["dense"][0]["quality"]
    gaps = {label: mean_behind(results, label) for label in LABELS}
    required = 1 + PART * (gain - 1)
    return Outcome(
        all_hold(planned / uniform >= required, within(gaps["planned"], allowed)),
        {"fewer bytes": f"{planned / uniform:.2f} times", **accuracies(results, DENSE, "planned")},
        "Bytes are compared in the second half of the run. Plans are "
        f"{behind_or_ahead(gaps['planned'])} uncompressed training. Required: {required:.2f} "
        f"times fewer "
        f"bytes, and at most {allowed:.1f} points behind. A uniform setting at the bound of what "
        f"plans may choose sends {bound / uniform:.1f} times fewer bytes, and is "
        f"{behind_or_ahead(gaps['bound'])} uncompressed training.",
    )


def level(label: str, results: Results) -> Outcome:
    """Judges whether a method is within 1 % of uncompressed training."""
    gap, allowed = mean_behind(results, label), WITHIN / 100 * results["dense"][0]["quality"]
    return Outcome(
        within(gap, allowed),
        {
            **accuracies(results, DENSE),
            "compressed": f"{points(results, label, 1)} % at {ratio(results, label):.0f} times",
        },
        f"It is {behind_or_ahead(gap)} uncompressed training. Required: at most 1 % behind. The "
        f"ratio "
        "depends on the network, and is not judged.",
    )


def uniform_claim(family: str, says: str) -> Claim:
    """Returns the claim that a method's uniform setting is as accurate as uncompressed training."""
    runs = {label: run for label, run in runs_of(family).items() if label in ("dense", "uniform")}
    return Claim(
        f"{family}/accuracy",
        says,
        checked=True,
        ran=f"The digits network, SGD with momentum, 4 workers, {DIGITS.steps} steps.",
        runs=runs,
        check=functools.partial(level, "uniform"),
    )


RAN = (
    f"The digits network, SGD with momentum, 4 workers, {DIGITS.steps} steps, a plan after each "
    "22, compared with the uniform setting, and with a uniform setting at the bound of what plans "
    "may choose. One layer has 87 % of the parameters, so a plan can hardly shift bytes between "
    "layers."
)
PAPERS = (
    Paper(
        "L-GreCo",
        "Markov et al., MLSys 2024, [arXiv 2210.17357](https://arxiv.org/abs/2210.17357)",
        [
            Claim(
                "lgreco/qsgd",
                "Compared with QSGD of 4 bits, plans send 1.10 times fewer bytes on ResNet18 "
                "(CIFAR-100), within 1 % of the accuracy.",
                checked=True,
                ran=RAN,
                runs=runs_of("qsgd"),
                check=functools.partial(_fewer, 1.1),
            ),
            Claim(
                "lgreco/top_k",
                "Compared with top-k of 1 %, plans send 2.67 times fewer bytes on ResNet50 "
                "(ImageNet), within 1 % of the accuracy.",
                checked=True,
                ran=RAN,
                runs=runs_of("top_k"),
                check=functools.partial(_fewer, 2.7),
            ),
            Claim(
                "lgreco/power_sgd",
                "Compared with PowerSGD of rank 32, plans send 1.48 times fewer bytes on "
                "Transformer-XL, within 1 % of the perplexity.",
                checked=True,
                ran=RAN + " The rank is 4, as in the paper for ResNet18.",
                runs=runs_of("power_sgd"),
                check=functools.partial(_fewer, 1.48),
            ),
            Claim(
                "lgreco/speed",
                "Training on several nodes is up to 2.5 times faster than with uniform settings.",
                checked=True,
                cannot="The figure was measured on 16 GPUs and a network of 10 Gbit/s.",
            ),
        ],
    ),
    Paper(
        "PowerSGD",
        "Vogels et al., NeurIPS 2019, [arXiv 1905.13727](https://arxiv.org/abs/1905.13727)",
        [
            uniform_claim(
                "power_sgd",
                "ResNet18 on CIFAR-100 reaches 76.36 % with rank 4 and 72 times fewer bytes, and "
                "76.60 % with uncompressed training (L-GreCo's table).",
            ),
            Claim(
                "power_sgd/cifar10",
                "ResNet18 on CIFAR10 reaches 94.4 % with rank 2 and 136 times fewer bytes, and "
                "94.3 % with uncompressed training.",
                checked=False,
                cannot="CIFAR10 is not available here.",
            ),
        ],
    ),
    Paper(
        "QSGD",
        "Alistarh et al., NeurIPS 2017, [arXiv 1610.02132](https://arxiv.org/abs/1610.02132)",
        [
            uniform_claim(
                "qsgd",
                "ResNet18 on CIFAR-100 reaches 76.80 % with 4 bits and 7.8 times fewer bytes, and "
                "76.60 % with uncompressed training (L-GreCo's table).",
            ),
            Claim(
                "qsgd/imagenet",
                "ResNet50 on ImageNet reaches full accuracy with 4 bits.",
                checked=False,
                cannot="ImageNet is not available here.",
            ),
        ],
    ),
    Paper(
        "TopK",
        "Aji and Heafield, EMNLP 2017, [arXiv 1704.05021](https://arxiv.org/abs/1704.05021)",
        [
            uniform_claim(
                "top_k",
                "ResNet18 on CIFAR-100 reaches 75.73 % with 1 % of the entries and 48 times fewer "
                "bytes, and 76.60 % with uncompressed training (L-GreCo's table).",
            ),
            Claim(
                "top_k/translation",
                "Machine translation loses nothing if 99 % of each gradient is not sent, and "
                "trains 22 % faster.",
                checked=False,
                cannot="The data is not available here, and the speed was measured on GPUs.",
            ),
        ],
    ),
)
