"""Summing whole gradients in a smaller float type, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def sum_as(
    dtype: np.dtype, gradients: Sequence[Sequence[np.ndarray]]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the vector that each replica sends, and the sums that they get back.

    Args:
        dtype: In which they sum, replica after replica.
        gradients: By replica and tensor.

    Returns:
        The vectors, and the float32 sums by tensor, which are not finite where any input is not.
    """
    sent = [
        np.concatenate(
            [np.asarray(gradient).astype(dtype).reshape(-1) for gradient in replica_gradients]
        )
        for replica_gradients in gradients
    ]
    total = sent[0]
    for values in sent[1:]:
        total = total + values
    bounds = np.cumsum([gradient.size for gradient in gradients[0]])[:-1]
    return sent, [
        part.astype(np.float32).reshape(gradient.shape)
        for part, gradient in zip(np.split(total, bounds), gradients[0], strict=True)
    ]
