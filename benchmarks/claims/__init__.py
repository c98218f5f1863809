"""The claims of all papers."""

from claims import adacomp, lgc, lgreco, on_digits, scalecom
from claims.claim import Claim, Paper

PAPERS: tuple[Paper, ...] = (
    *(adacomp.PAPER, scalecom.PAPER, lgc.PAPER),
    *lgreco.PAPERS,
    *on_digits.PAPERS,
)
CLAIMS: dict[str, Claim] = {claim.name: claim for paper in PAPERS for claim in paper.claims}
