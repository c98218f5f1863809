"""The method of an exchange: one compressor, or several to choose from."""

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
    """The method of an exchange: one compressor, or several to choose from.

    Attributes:
        text: The compressor that the user gave, as text; equal on all workers.
        candidates: One or several candidates. `choose` takes one when the exchange is built.
        choose: Takes the group of replicas, the candidates and the specs of the gradients, and
            returns a candidate. All workers make the same choice.
        moments: The preconditioner that the inner optimizer allows, if any. Its state is kept even
            if no candidate uses it, because a checkpoint may have been preconditioned.
    """

    text: str
    candidates: Sequence[Candidate]
    choose: Callable[[Group, Sequence[Candidate], Sequence[GradientSpec]], Candidate]
    moments: Preconditioner | None = None
