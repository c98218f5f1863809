"""Computes the step of a gathered method from the tensors that each replica sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tests.compressors.lockstep import Arrays, Outcome
from tf_gradcomp.compressors.base import RESIDUAL

Encoded = tuple[np.ndarray, Arrays, list[int]]  # payload, residuals, bytes of tensors


def gathered(
    encoded: Sequence[Encoded],
    shapes: Sequence[tuple[int, ...]],
    decode: Callable[[np.ndarray], Arrays | None],
) -> Outcome:
    """The outcome of a step in which replicas have `encoded`; `decode` gives None if not finite."""
    payloads = [payload for payload, _, _ in encoded]
    sent = [decode(payload) for payload in payloads]
    left, reduced, finite = _summed([rest for _, rest, _ in encoded], sent, shapes)
    size = len(encoded)
    tensor_bytes = [np.array(n, np.int64) for _, _, n in encoded]
    after = [{RESIDUAL: residuals} for residuals in left]
    return Outcome([reduced] * size, [finite] * size, after, payloads, tensor_bytes)


def _summed(
    left: Sequence[Arrays], sent: Sequence[Arrays | None], shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Arrays], Arrays, bool]:
    """Residuals, reduced gradients, and whether the step counts.

    If not, all values return to the residuals, except that values whose sum is too large are
    dropped.
    """
    reduced = [np.zeros(shape, np.float32) for shape in shapes]
    if all(values is not None for values in sent):
        for replica_values in sent:
            with np.errstate(over="ignore"):
                reduced = [
                    total + values for total, values in zip(reduced, replica_values, strict=True)
                ]
        if all(np.isfinite(total).all() for total in reduced):
            return list(left), reduced, True
        return list(left), [np.zeros_like(total) for total in reduced], False
    put_back = [
        rest if values is None else [r + v for r, v in zip(rest, values, strict=True)]
        for rest, values in zip(left, sent, strict=True)
    ]
    return put_back, reduced, False
