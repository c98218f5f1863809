"""The claims of TopK's paper."""

from __future__ import annotations

from claims.claim import Claim, Paper
from claims.lgreco import uniform_claim

PAPER = Paper(
    "TopK",
    "Aji and Heafield, EMNLP 2017, [arXiv 1704.05021](https://arxiv.org/abs/1704.05021)",
    [
        uniform_claim(
            "top_k",
            "ResNet18 on CIFAR-100 reaches 75.73 % with 1 % of the entries and 76.60 % dense, "
            "with 48 times fewer bytes (L-GreCo's table).",
            "76.6 and 75.7 %, 48 times",
        ),
        Claim(
            "top_k/translation",
            "Machine translation loses nothing without 99 % of the gradient, and is 22 % faster.",
            "nothing lost",
            recalled=True,
            cannot="The data is not here, and the speed is that of the paper's GPUs.",
        ),
    ],
)
