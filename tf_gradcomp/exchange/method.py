"""What an exchange compresses with: one method, or several to choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.compressors.base import Compressor
from tf_gradcomp.groups.group import Group
from tf_gradcomp.policy import GradientSpec


class Candidate(NamedTuple):
    """A compressor that may be chosen, and the preconditioner in front of it."""

    compressor: Compressor
    preconditioner: Preconditioner | None = None


class Method(NamedTuple):
    """What an exchange compresses with: one method, or several to choose from.

    Attributes:
        text: The compressor that the user gave, as text; equal on all workers.
        candidates: One or several; `choose` takes one of them when the exchange is built.
        choose: Called with the group of replicas, the candidates and what is known of the
            gradients; all workers choose alike.
        moments: The preconditioner that the inner optimizer allows, if any. Its state is kept also
            where it is in front of no candidate, for a checkpoint may have been preconditioned.
    """

    text: str
    candidates: Sequence[Candidate]
    choose: Callable[[Group, Sequence[Candidate], Sequence[GradientSpec]], Candidate]
    moments: Preconditioner | None = None
