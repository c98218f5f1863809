"""Lists the methods that were measured to train as well as dense."""

from __future__ import annotations

from tf_gradcomp.compressors.auto import CANDIDATES
from tf_gradcomp.compressors.registry import text_of
from tf_gradcomp.exchange.method import Candidate

# Beyond a limit of docs/advise.md, by the figures there.
_BEHIND = ("scalecom", "random_k", "sign_sgd", "qsgd", "power_sgd")


def trains_like_dense(candidate: Candidate) -> bool | None:
    """Tells whether a method was measured to train like dense; None if these settings were not.

    Methods that are helped by Adam's second moment in front of them were measured with it.
    """
    text = text_of(candidate.compressor)
    if text in _BEHIND:
        return False
    as_measured = candidate.preconditioner or not candidate.compressor.helped_by_precondition
    return True if text in CANDIDATES and as_measured else None
