"""MuLoCo in NumPy: rounds of local steps with Muon inside, and SGD with Nesterov outside.

Thérien et al., https://arxiv.org/abs/2505.23725. Muon is that of `keras.optimizers.Muon`: momentum,
then Newton-Schulz, for matrices; AdamW for other variables and embeddings. Results are float64, and
come with bounds of the error of float32, which follow from the arithmetic.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from tests.bounds import adam_bound, rounding

U = 2.0**-24  # the unit roundoff of float32
A, B, C = 3.4445, -4.7750, 2.0315  # of the quintic polynomial of an iteration
NS_STEPS = 5
RMS = 0.2
ADAM_STEP = 4.0  # the largest step of AdamW in learning rates, in a few steps


def orthogonalized(matrix: np.ndarray, error: float) -> tuple[np.ndarray, float]:
    """Newton-Schulz, and a bound of its error in float32, as a Frobenius norm.

    An iteration maps each singular value by a polynomial. The map multiplies an earlier error by at
    most the polynomial's largest derivative. To this comes the rounding of the iteration itself: a
    product of matrices with n terms rounds each entry by at most `n * U` times the sum of the
    terms' magnitudes. The factor 2 covers the products of errors.

    Args:
        matrix: The momentum.
        error: A bound of the error of `matrix`, as a Frobenius norm.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    norm = np.linalg.norm(x)
    x, error = x / (norm + 1e-7), error / norm + 2 * (x.size + 3) * U
    rows, columns = x.shape
    for _ in range(NS_STEPS):
        size = np.abs(x)
        product = size @ size.T
        product_error = columns * U * product
        sums = abs(B) * product + abs(C) * product @ product
        sums_error = (
            abs(B) * product_error
            + abs(C) * (product_error @ product + product @ product_error)
            + (rows + 3) * U * sums
        )
        step_error = sums_error @ size + (rows + 3) * U * (A * size + sums @ size)
        values = np.linspace(0, np.linalg.norm(x, 2) + error, 1000)
        slope = np.abs(A + 3 * B * values**2 + 5 * C * values**4).max()
        error = slope * error + 2 * np.linalg.norm(step_error)
        squared = x @ x.T
        x = A * x + (B * squared + C * squared @ squared) @ x
    return (x.T if tall else x), error


@dataclasses.dataclass
class Muon:
    """Keras' Muon on one worker, for gradients that do not depend on the weights.

    Attributes:
        error: For each variable, a bound of the error of its weights since the round began.
    """

    paths: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    rate: float
    decay: float = 0.0
    adam_decay: float = 0.0
    clipnorm: float | None = None
    global_clipnorm: float | None = None

    def __post_init__(self) -> None:
        self.momentum = [np.zeros(shape) for shape in self.shapes]
        self.velocity = [np.zeros(shape) for shape in self.shapes]
        self.updates = 0
        self.momentum_error = [0.0] * len(self.shapes)
        self.begin()

    def begin(self) -> None:
        """Begins a round."""
        self.error = [0.0] * len(self.shapes)

    def uses_adam(self, index: int) -> bool:
        """Whether a variable is updated as by AdamW."""
        return len(self.shapes[index]) != 2 or bool(re.search("embedding", self.paths[index]))

    def step(self, weights: list[np.ndarray], gradients: Sequence[np.ndarray | None]) -> None:
        """Updates weights in place; variables without a gradient stay unchanged."""
        clipped = self._clipped(gradients)
        for index, gradient in enumerate(clipped):
            if gradient is None:
                continue
            decay = self.adam_decay if self.uses_adam(index) else self.decay
            weights[index] -= weights[index] * decay * self.rate
            self.error[index] += 4 * U * np.abs(weights[index]).max()
            update = self._adam if self.uses_adam(index) else self._muon
            change, error = update(index, gradient)
            weights[index] -= change
            self.error[index] += error
        self.updates += 1

    def _clipped(self, gradients: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
        norms = [None if g is None else np.linalg.norm(np.float64(g)) for g in gradients]
        if self.global_clipnorm:
            total = np.sqrt(sum(norm**2 for norm in norms if norm is not None))
            scales = [min(1.0, self.global_clipnorm / total)] * len(norms)
        elif self.clipnorm:
            scales = [norm and min(1.0, self.clipnorm / norm) for norm in norms]
        else:
            scales = [1.0] * len(norms)
        return [
            None if gradient is None else scale * np.float64(gradient)
            for scale, gradient in zip(scales, gradients, strict=True)
        ]

    def _muon(self, index: int, gradient: np.ndarray) -> tuple[np.ndarray, float]:
        self.momentum[index] += gradient - 0.05 * self.momentum[index]
        nesterov = gradient + 0.95 * self.momentum[index]
        of_gradient = self._clip_terms * U * np.abs(gradient).max()
        largest = [np.abs(values).max() for values in (gradient, self.momentum[index], nesterov)]
        self.momentum_error[index] += of_gradient + 6 * U * sum(largest)
        error = of_gradient + self.momentum_error[index]
        update, error = orthogonalized(nesterov, error * np.sqrt(gradient.size))
        scale = self.rate * np.sqrt(max(gradient.shape)) * RMS
        return scale * update, scale * (error + 4 * U * np.abs(update).max())

    @property
    def _clip_terms(self) -> int:
        """How often clipping rounds: a norm sums all squares."""
        clips = self.clipnorm or self.global_clipnorm
        return sum(math.prod(shape) for shape in self.shapes) + 3 if clips else 0

    def _adam(self, index: int, gradient: np.ndarray) -> tuple[np.ndarray, float]:
        step = self.updates + 1
        self.momentum[index] += 0.1 * (gradient - self.momentum[index])
        self.velocity[index] += 0.001 * (gradient**2 - self.velocity[index])
        alpha = self.rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        change = alpha * self.momentum[index] / (np.sqrt(self.velocity[index]) + 1e-7)
        assert np.abs(change).max() <= ADAM_STEP * self.rate
        return change, rounding(ADAM_STEP * self.rate, adam_bound() + 2 * self._clip_terms * step)


@dataclasses.dataclass
class Nesterov:
    """Keras' SGD with Nesterov momentum, as the outer optimizer."""

    rate: float
    momentum: float

    def __post_init__(self) -> None:
        self._velocity: list[np.ndarray] = []

    def step(
        self, weights: Sequence[np.ndarray], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Returns the updated weights."""
        before = self._velocity or [np.zeros_like(weight) for weight in weights]
        self._velocity = [
            self.momentum * velocity - self.rate * gradient
            for velocity, gradient in zip(before, gradients, strict=True)
        ]
        return [
            weight + self.momentum * velocity - self.rate * gradient
            for weight, velocity, gradient in zip(weights, self._velocity, gradients, strict=True)
        ]
