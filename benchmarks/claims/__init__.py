"""The claims of all papers, a file for each."""

from claims import (
    acp_sgd,
    adacomp,
    arc_top_k,
    lgc,
    lgreco,
    max_norm,
    power_sgd,
    qsgd,
    scalecom,
    sidco,
    sketches,
    top_k,
)
from claims.claim import Claim, Paper

PAPERS: tuple[Paper, ...] = tuple(
    module.PAPER
    for module in (
        *(adacomp, scalecom, lgc, lgreco, power_sgd, qsgd, top_k),
        *(sidco, max_norm, acp_sgd, arc_top_k, sketches),
    )
)
CLAIMS: dict[str, Claim] = {claim.name: claim for paper in PAPERS for claim in paper.claims}
