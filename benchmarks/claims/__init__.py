"""The claims of all papers."""

from claims import adacomp, lgreco, on_digits, scalecom
from claims.claim import Claim, Paper

PAPERS: tuple[Paper, ...] = (
    *(adacomp.PAPER, scalecom.PAPER, scalecom.LGC),
    *lgreco.PAPERS,
    *on_digits.PAPERS,
)
CLAIMS: dict[str, Claim] = {claim.name: claim for paper in PAPERS for claim in paper.claims}
