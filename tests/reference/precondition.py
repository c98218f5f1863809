"""Adam's division by the root of the second moment, in NumPy."""

from __future__ import annotations

import numpy as np


def precondition(
    second_moment: np.ndarray,
    gradient: np.ndarray,
    step: int,
    *,
    beta_2: float,
    epsilon: float,
    scale: float = 1.0,
    squares: np.ndarray | None = None,
    corrects_epsilon: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a gradient's quotient, and its second moment afterwards; float32.

    Args:
        second_moment: float32, before the step.
        gradient: Of any float type.
        step: From 1 on.
        beta_2: Adam's.
        epsilon: Adam's.
        scale: The factor of the second moment, in addition to Adam's bias correction.
        squares: float32, taken in place of the gradient's squares.
        corrects_epsilon: Whether `epsilon` is divided by the root of Adam's bias correction.
    """
    value = np.asarray(gradient).astype(np.float32)
    decay = np.float32(beta_2)
    square = value * value if squares is None else squares
    moment = second_moment + (np.float32(1) - decay) * (square - second_moment)
    correction = 1 - np.float64(decay) ** step
    factor = np.float32(np.float64(np.float32(scale)) / correction)
    added = np.float64(np.float32(epsilon))
    if corrects_epsilon:
        added /= np.sqrt(correction)
    return value / (np.sqrt(factor) * np.sqrt(moment) + np.float32(added)), moment
