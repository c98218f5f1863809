"""What a step of a gathered method gives, once it is known what each replica sends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.compressors.lockstep import Arrays


def summed(
    left: Sequence[Arrays], sent: Sequence[Arrays | None], shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Arrays], Arrays, bool]:
    """What gathering gives: residuals, reduced gradients, and whether the step counts.

    `sent` is None for a replica whose gradients were not finite; the others then put theirs back.
    """
    reduced = [np.zeros(shape, np.float32) for shape in shapes]
    if all(values is not None for values in sent):
        for of_one in sent:
            reduced = [total + values for total, values in zip(reduced, of_one, strict=True)]
        return list(left), reduced, True
    put_back = [
        rest if values is None else [r + v for r, v in zip(rest, values, strict=True)]
        for rest, values in zip(left, sent, strict=True)
    ]
    return put_back, reduced, False
