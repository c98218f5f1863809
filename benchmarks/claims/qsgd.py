"""The claims of QSGD's paper."""

from __future__ import annotations

from claims.claim import Claim, Paper
from claims.lgreco import uniform_claim

PAPER = Paper(
    "QSGD",
    "Alistarh et al., NeurIPS 2017, [arXiv 1610.02132](https://arxiv.org/abs/1610.02132)",
    [
        uniform_claim(
            "qsgd",
            "ResNet18 on CIFAR-100 reaches 76.80 % with 4 bits and 76.60 % dense, with 7.8 times "
            "fewer bytes (L-GreCo's table).",
            "76.6 and 76.8 %, 7.8 times",
        ),
        Claim(
            "qsgd/imagenet",
            "ResNet50 on ImageNet reaches full accuracy with 4 bits.",
            "full accuracy",
            recalled=True,
            cannot="ImageNet is not here.",
        ),
    ],
)
