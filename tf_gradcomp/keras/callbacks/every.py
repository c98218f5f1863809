"""Frequency of a callback's work: after each epoch, or after a number of steps."""

from __future__ import annotations

import sys

from tf_gradcomp.compressors.settings import is_whole_number

EPOCH = "epoch"


def checked_every(callback: str, every: str | int) -> str | int:
    """Returns `every`, of a callback of this name.

    Raises:
        ValueError: If it is neither `"epoch"` nor a whole number of at least 1.
    """
    if every != EPOCH and not is_whole_number(every, 1, sys.maxsize):
        raise ValueError(
            f'{callback}: every must be "{EPOCH}" or a whole number of at least 1; received '
            f"{every!r}."
        )
    return every
