"""Computes one step of PowerSGD, for the conformance tests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from tests.compressors.lockstep import Arrays, Outcome, State, kept_residuals, sums_of
from tests.reference import power_sgd
from tf_gradcomp.compressors import PowerSGD
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.compressors.power_sgd import ALTERNATING_FACTOR, FACTOR
from tf_gradcomp.policy import GradientSpec


def power_sgd_oracle(
    compressor: PowerSGD,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
    settings: Sequence[int] | None = None,
) -> Outcome:
    ranks = settings or compressor.settings(specs)
    sums, finite = sums_of(state, gradients)
    size = len(sums)
    factors = state[0][FACTOR]
    in_force = [power_sgd.in_force(*pair) for pair in zip(factors, ranks, strict=True)]
    if all(finite):
        steps = [
            power_sgd.step(matrices, factor)
            for matrices, factor in zip(
                zip(*sums, strict=True), power_sgd.start(in_force, step), strict=True
            )
        ]
        reduced = as_float32(one.reduced for one in steps)
        factors = as_float32(
            power_sgd.stored(one.factor, like) for one, like in zip(steps, factors, strict=True)
        )
        after = [
            {RESIDUAL: as_float32(one.residuals[i] for one in steps), FACTOR: factors}
            for i in range(size)
        ]
        rights = [[one.rights[i].T for one in steps] for i in range(size)]
    else:
        reduced = [np.zeros(spec.shape, np.float32) for spec in specs]
        kept = kept_residuals(state, sums, finite)
        after = [{**replica, RESIDUAL: local} for replica, local in zip(state, kept, strict=True)]
        rights = [[np.zeros_like(factor) for factor in in_force]] * size
    flags = [[np.array(0 if is_finite else np.nan)] for is_finite in finite]
    lefts = [flag + total for flag, total in zip(flags, sums, strict=True)]
    payloads = [
        np.concatenate([array.ravel() for array in of_one]).astype(np.float32)
        for of_one in (rights if any(ranks) else lefts)
    ]
    if settings and not any(ranks):  # whether a right factor is sent is not known beforehand
        payloads = [np.zeros(1, np.float32)] * size
    elements = [
        rank * (math.prod(spec.shape[:-1]) + spec.shape[-1]) if rank else spec.elements
        for rank, spec in zip(ranks, specs, strict=True)
    ]
    tensor_bytes = 4 * np.array(elements, np.int64)
    return Outcome([reduced] * size, [all(finite)] * size, after, payloads, [tensor_bytes] * size)


def alternating_oracle(
    compressor: PowerSGD,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
    settings: Sequence[int] | None = None,
) -> Outcome:
    """Computes one step with `alternate`; tensors that send P, or all of themselves, come first."""
    ranks = settings or compressor.settings(specs)
    sums, finite = sums_of(state, gradients)
    size, factors = len(sums), state[0][ALTERNATING_FACTOR]
    in_force = [power_sgd.in_force(*pair) for pair in zip(factors, ranks, strict=True)]
    tensors = list(zip(*sums, strict=True))
    rights = [power_sgd.sends_right(t[0], f) for t, f in zip(tensors, in_force, strict=True)]
    order = sorted(range(len(specs)), key=lambda i: rights[i])
    halves = power_sgd.start([power_sgd.known(tensors[i][0], in_force[i]) for i in order], step)
    steps = {
        i: power_sgd.alternate(tensors[i], half, right=rights[i])
        for i, half in zip(order, halves, strict=True)
    }
    payloads = []
    for replica, is_finite in enumerate(finite):
        sent = [steps[i].sent[replica].ravel().astype(np.float32) for i in order]
        for array in sent:
            if not np.isfinite(array).all():
                array[0] = np.nan
        payloads.append(np.concatenate([np.float32([0 if is_finite else np.nan]), *sent]))
    tensor_bytes = np.array([4 * steps[i].sent[0].size for i in range(len(specs))], np.int64)
    if all(finite):
        reduced = as_float32(steps[i].reduced for i in range(len(specs)))
        factors = as_float32(power_sgd.stored(steps[i].factor, f) for i, f in enumerate(factors))
        residuals = [
            as_float32(steps[i].residuals[replica] for i in range(len(specs)))
            for replica in range(size)
        ]
    else:
        reduced = [np.zeros(spec.shape, np.float32) for spec in specs]
        residuals = kept_residuals(state, sums, finite)
    after = [{RESIDUAL: kept, ALTERNATING_FACTOR: factors} for kept in residuals]
    return Outcome([reduced] * size, [all(finite)] * size, after, payloads, [tensor_bytes] * size)


def as_float32(arrays: Iterable[np.ndarray]) -> Arrays:
    return [array.astype(np.float32) for array in arrays]
