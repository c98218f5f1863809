"""The forms of gradients: slices of some rows, or dense tensors."""

from __future__ import annotations

from collections.abc import Sequence

from tf_gradcomp.exchange.gradients import Gradients
from tf_gradcomp.exchange.setup import Setup


class Forms:
    """Remembers which gradients the compressor exchanges, and which are summed as slices."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._sparse: set[int] = set()
        self._dense: set[int] = set()

    def is_divided(self, number: int) -> bool:
        """Returns whether a variable's gradients are divided before they are exchanged."""
        return self._setup.preconditioner is not None and number in self._dense

    def check(self, numbers: Sequence[int], gradients: Gradients) -> list[int]:
        """Returns the places of gradients that the compressor exchanges."""
        setup, pairs = self._setup, zip(numbers, gradients, strict=True)
        sparse = {number for number, one in pairs if setup.stays_sparse(number, one)}
        if setup.preconditioner:
            all_sparse, all_dense = self._sparse | sparse, self._dense | set(numbers) - sparse
            both = [setup.specs[number].path for number in all_sparse & all_dense]
            if both:
                raise ValueError(
                    f"The gradients of {', '.join(both)} came dense in one step and as slices in "
                    "another, and Adam's second moment can be kept for only one of these forms; "
                    "use precondition=None."
                )
            self._sparse, self._dense = all_sparse, all_dense
        return [place for place, number in enumerate(numbers) if number not in sparse]
