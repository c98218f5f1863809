"""SIDCo in NumPy: fits, thresholds, selection and whole payloads.

Abdelmoniem et al., MLSys 2021, https://arxiv.org/abs/2101.10761.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.reference import payload as payload_format

METHOD = 7
FIRST_DENSITY = 0.25
FEWEST_ELEMENTS = 1024
LEAST_CAP = 64
CORRECTIONS = 3

Arrays = Sequence[np.ndarray]


def quantile(sample: np.ndarray, density: float) -> float:
    """The threshold that the share `density` of a generalized Pareto distribution exceeds.

    The distribution is fitted by matched moments.
    """
    mean, variance = sample.mean(), sample.var(ddof=1)
    if not variance:
        return math.nan
    ratio = mean**2 / variance
    shape, scale = (ratio - 1) / 2, mean * (ratio + 1) / 2
    log = np.log(density)
    if abs(shape) < 1e-4:
        return -scale * log * (1 + shape * log / 2)
    return scale * -np.expm1(shape * log) / shape


def stages_by_density(density: float) -> int:
    """Returns the number of stages, each of which keeps at least a tenth."""
    return 1 + max(0, math.ceil(math.log10(FIRST_DENSITY / density)))


def threshold(magnitudes: np.ndarray, density: float) -> np.float32:
    """Returns the estimate after the last stage, corrected."""
    wanted, stages = density * magnitudes.size, stages_by_density(density)
    sample, lowest, result = magnitudes, np.float32(0), np.float32(0)
    for left in range(stages, 0, -1):
        above = sample[sample > result]
        if above.size <= max(wanted, 1):
            break
        first = left == stages
        share = (wanted / above.size) ** (1 / left)
        if first and stages > 1:
            share = max(wanted / above.size, FIRST_DENSITY)
        least = np.float32(0) if first else above.min()
        estimate = least + quantile(above.astype(np.float64) - least, share)
        if not np.isfinite(estimate):
            break
        sample, lowest, result = above, least, np.float32(estimate)
    return corrected(sample, lowest, result, wanted)


def corrected(
    sample: np.ndarray, lowest: np.float32, threshold: np.float32, wanted: float
) -> np.float32:
    """Moves a threshold towards one that so many exceed; the number's logarithm is linear."""
    goal = np.log(wanted)
    low = high = best = (np.float64(lowest), log_count(sample >= lowest))
    for _ in range(1 + CORRECTIONS):
        here = (np.float64(threshold), log_count(sample > threshold))
        if abs(here[1] - goal) < abs(best[1] - goal):
            best = here
        if here[1] > goal:
            low, there = here, high
        else:
            high, there = here, low
        with np.errstate(all="ignore"):
            slope = (there[0] - here[0]) / (there[1] - here[1])
            moved = np.float32(here[0] + slope * (goal - here[1]))
        threshold = moved if np.isfinite(moved) else threshold
    return np.float32(best[0])


def log_count(above: np.ndarray) -> np.float64:
    """Returns the logarithm of a number, which is taken as at least 0.5."""
    return np.log(max(np.count_nonzero(above), 0.5))


def select(values: np.ndarray, density: float) -> np.ndarray:
    """The places that are sent, ascending."""
    magnitudes = np.abs(values)
    if values.size < FEWEST_ELEMENTS:
        return largest(magnitudes, max(1, round(density * values.size)))
    above = np.flatnonzero(magnitudes > threshold(magnitudes, density))
    cap = max(math.floor(2 * density * values.size), LEAST_CAP)
    if not above.size:
        return largest(magnitudes, 1)
    return above[largest(magnitudes[above], cap)] if above.size > cap else above


def largest(magnitudes: np.ndarray, count: int) -> np.ndarray:
    """The places of the largest that are not 0; of equal ones the first."""
    indices = np.sort(np.argsort(-magnitudes, kind="stable")[:count])
    return indices[magnitudes[indices] > 0]


def encode_payload(
    residuals: Arrays, gradients: Arrays, step: int, fingerprint: int, density: float
) -> tuple[np.ndarray, list[np.ndarray], list[int]]:
    """The payload, the residuals after the step, and the bytes of each tensor."""
    plan = payload_format.plan_of()
    with np.errstate(over="ignore", invalid="ignore"):
        sums = [
            np.asarray(r + g.astype(np.float32)) for r, g in zip(residuals, gradients, strict=True)
        ]
    if not all(np.isfinite(total).all() for total in sums):
        flags = payload_format.NON_FINITE
        header = payload_format.Header(METHOD, fingerprint, step, len(sums), plan, flags)
        return payload_format.write(header), list(residuals), [0] * len(sums)
    header = payload_format.Header(METHOD, fingerprint, step, len(sums), plan)
    indices = [select(total.reshape(-1), density) for total in sums]
    counts = [index.size for index in indices]
    values = [total.reshape(-1)[at] for total, at in zip(sums, indices, strict=True)]
    body = np.concatenate([counts, *indices]).astype(np.int32).tobytes()
    body += np.concatenate(values).tobytes()
    for total, at in zip(sums, indices, strict=True):
        total.reshape(-1)[at] = 0
    return payload_format.write(header, body), sums, [4 + 8 * count for count in counts]


def decode_payload(payload: np.ndarray, shapes: Sequence[Sequence[int]]) -> list[np.ndarray] | None:
    """Decodes a replica's payload, one array per tensor; None if it was not finite."""
    header, body = payload_format.read(payload)
    if header.flags & payload_format.NON_FINITE:
        return None
    counts, rest = np.split(np.frombuffer(body, np.int32), [len(shapes)])
    indices, words = np.split(rest, 2)
    values = words.view(np.float32)
    ends = np.cumsum(counts)
    decoded = []
    for shape, end, count in zip(shapes, ends, counts, strict=True):
        tensor = np.zeros(shape, np.float32)
        tensor.reshape(-1)[indices[end - count : end]] = values[end - count : end]
        decoded.append(tensor)
    return decoded
