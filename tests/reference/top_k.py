"""TopK in NumPy: selection, whole payloads, and Deep Gradient Compression's momentum correction.

Every float32 operation happens in the order of the native ops, so that results are equal to the
bit. Momentum: Lin et al., ICLR 2018, https://arxiv.org/abs/1712.01887.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tests.reference import fixed_length
from tests.reference import payload as payload_format

METHOD = 4
BLOCK_SIZE = 2**16  # elements, of the sum of squares
LANES = 8  # sums in a block, side by side

Arrays = Sequence[np.ndarray]


def momentum_correction(
    velocities: Arrays, gradients: Arrays, momentum: float, clip_norm: float
) -> list[np.ndarray]:
    """Clipped gradients plus `momentum` times velocities (paper, section 3.2); none: `[]`."""
    scale = clip_scale(gradients, clip_norm)
    with np.errstate(over="ignore", invalid="ignore"):
        corrected = [scale * gradient.astype(np.float32) for gradient in gradients]
        for i, velocity in enumerate(velocities):
            corrected[i] = corrected[i] + np.float32(momentum) * velocity
    return corrected


def clip_scale(gradients: Arrays, clip_norm: float) -> np.float32:
    """Returns the factor that clips the norm of all gradients (paper, section 3.2)."""
    blocks = [
        gradient.reshape(-1)[i : i + BLOCK_SIZE].astype(np.float64)
        for gradient in gradients
        for i in range(0, gradient.size, BLOCK_SIZE)
    ]
    with np.errstate(invalid="ignore"):
        norm = np.sqrt(_sum_in_order(np.array([_sum_of_squares(block) for block in blocks])))
        limit = np.float64(np.float32(clip_norm))
        return np.float32(limit / norm) if norm > limit else np.float32(1)


@dataclasses.dataclass(frozen=True)
class TopK:
    """Sends some entries, the largest, or all that there are if they are fewer."""

    entries: int

    def encode(self, values: np.ndarray) -> bytes:
        """Indices, ascending, then values; of entries with equal magnitudes, the first are sent."""
        order = np.argsort(-np.abs(values), kind="stable")
        indices = np.sort(order[: self.entries])
        return indices.astype(np.uint32).tobytes() + values[indices].tobytes()

    def decode(self, data: bytes, size: int) -> np.ndarray:
        """The values in their places, and zeros elsewhere."""
        indices, sent = np.frombuffer(data, np.uint32).reshape(2, min(self.entries, size))
        values = np.zeros(size, np.float32)
        values[indices] = sent.view(np.float32)
        return values


def encode_payload(
    residuals: Arrays, gradients: Arrays, step: int, *, entries: Sequence[int], fingerprint: int
) -> tuple[np.ndarray, list[np.ndarray], list[int]]:
    """Does the work of `tf_gradcomp.ops.top_k_encode`: see `fixed_length.encode_payload`."""
    plan = payload_format.plan_of(entries)
    header = payload_format.Header(METHOD, fingerprint, step, len(residuals), plan)
    return fixed_length.encode_payload(header, _codecs(entries), residuals, gradients)


def decode_payload(
    payload: np.ndarray, shapes: Sequence[Sequence[int]], entries: Sequence[int]
) -> list[np.ndarray] | None:
    """Decodes a replica's payload, one array per tensor; None if it was not finite."""
    return fixed_length.decode_payload(payload, _codecs(entries), shapes)


def kept_velocities(
    velocities: Arrays,
    corrected: Arrays,
    payload: np.ndarray,
    entries: Sequence[int],
    sent: bool,
) -> list[np.ndarray]:
    """Does the work of `tf_gradcomp.ops.top_k_keep_velocity` (paper, section 3.3)."""
    header, body = payload_format.read(payload)
    if header.flags & payload_format.NON_FINITE:
        return list(velocities)
    kept, start = [], 0
    for values, count in zip(corrected, entries, strict=True):
        velocity = values.reshape(-1).copy()
        entries_sent = min(count, velocity.size)
        if sent:
            velocity[np.frombuffer(body, np.uint32, entries_sent, start)] = 0
        kept.append(velocity.reshape(values.shape))
        start += 8 * entries_sent if count else values.nbytes
    return kept


def _codecs(entries: Sequence[int]) -> list[fixed_length.Codec]:
    return [TopK(count) if count else fixed_length.Whole() for count in entries]


def _sum_of_squares(values: np.ndarray) -> np.float64:
    lanes = np.pad(values, (0, -values.size % LANES)).reshape(-1, LANES)
    return _sum_in_order(np.cumsum(lanes * lanes, axis=0)[-1])


def _sum_in_order(values: np.ndarray) -> np.float64:
    """Sums one by one, because NumPy's sum uses another order."""
    return np.cumsum(values)[-1] if values.size else np.float64(0)
