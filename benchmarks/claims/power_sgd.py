"""The claims of PowerSGD's paper."""

from __future__ import annotations

from claims.claim import Claim, Paper
from claims.lgreco import uniform_claim

PAPER = Paper(
    "PowerSGD",
    "Vogels et al., NeurIPS 2019, [arXiv 1905.13727](https://arxiv.org/abs/1905.13727)",
    [
        uniform_claim(
            "power_sgd",
            "ResNet18 on CIFAR-100 reaches 76.36 % with rank 4 and 76.60 % dense, with 72 times "
            "fewer bytes (L-GreCo's table).",
            "76.6 and 76.4 %, 72 times",
        ),
        Claim(
            "power_sgd/cifar10",
            "ResNet18 on CIFAR10 reaches 94.3 % dense, and 94.4 % with rank 2 and 136 times fewer "
            "bytes.",
            "94.3 and 94.4 %, 136 times",
            recalled=True,
            cannot="CIFAR10 is not here.",
        ),
    ],
)
