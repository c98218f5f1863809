"""One step of ScaleCom and RandomK in NumPy: all replicas at once."""

from __future__ import annotations

import fractions
import functools
from collections.abc import Sequence

import numpy as np

from tests.compressors.lockstep import Arrays, Outcome, State
from tf_gradcomp.compressors import RandomK, ScaleCom
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.policy import VECTOR, GradientSpec
from tf_gradcomp.reference import chunks


def scalecom_oracle(
    compressor: ScaleCom,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
    settings: Sequence[int] | None = None,
) -> Outcome:
    rates = settings or [compressor.rate(spec) for spec in specs]
    groups = groups_of(specs, rates)
    chunk_sizes = list(dict(zip(groups, rates, strict=True)).values())
    leader = step % len(gradients)
    had = chunks.joined(state[leader][RESIDUAL], groups)
    led = [m + g for m, g in zip(had, chunks.joined(gradients[leader], groups), strict=True)]
    offsets = [chunks.select(y, size) for y, size in zip(led, chunk_sizes, strict=True)]
    bits = [fractions.Fraction((rate - 1).bit_length(), len(gradients)) for rate in rates]
    return chunked_oracle(
        specs, state, gradients, groups, chunk_sizes, offsets, bits, compressor.beta
    )


def groups_of(specs: Sequence[GradientSpec], rates: Sequence[int]) -> list[int]:
    """Vectors of one rate are cut into chunks together."""
    numbers: dict[int | str, int] = {}
    return [
        numbers.setdefault(rate if spec.kind == VECTOR else spec.path, len(numbers))
        for spec, rate in zip(specs, rates, strict=True)
    ]


def random_k_oracle(
    compressor: RandomK,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
    settings: Sequence[int] | None = None,
) -> Outcome:
    chunk_sizes = settings or [round(1 / (compressor.density.of(spec) or 1)) for spec in specs]
    sizes = [spec.elements for spec in specs]
    offsets = chunks.draw(sizes, chunk_sizes, compressor.seed, step)
    groups = list(range(len(specs)))
    return chunked_oracle(specs, state, gradients, groups, chunk_sizes, offsets, [0] * len(specs))


def chunked_oracle(
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    groups: list[int],
    chunk_sizes: list[int],
    offsets: Arrays,
    offset_bits: Sequence[fractions.Fraction | int],
    beta: float = 1.0,
) -> Outcome:
    at = [chunks.places(o, size) for o, size in zip(offsets, chunk_sizes, strict=True)]
    had = [chunks.joined(of_one[RESIDUAL], groups) for of_one in state]
    new = [chunks.joined(of_one, groups) for of_one in gradients]
    sums = [[m + g for m, g in zip(ms, gs, strict=True)] for ms, gs in zip(had, new, strict=True)]
    flags = [all(np.isfinite(y).all() for y in ys) for ys in sums]
    given = [
        np.concatenate([*[y[i] for y, i in zip(ys, at, strict=True)], [0 if flag else np.nan]])
        for ys, flag in zip(sums, flags, strict=True)
    ]
    given = [values.astype(np.float32) for values in given]
    with np.errstate(over="ignore"):
        totals = functools.reduce(np.add, given)
    finite = bool(np.isfinite(totals).all())
    whole = [np.zeros_like(m) for m in had[0]]
    after = []
    for ms, gs, flag in zip(had, new, flags, strict=True):
        if finite:
            left = [chunks.keep(m, g, i, beta) for m, g, i in zip(ms, gs, at, strict=True)]
        else:
            left = [m + np.float32(beta) * g if flag else m for m, g in zip(ms, gs, strict=True)]
        after.append({RESIDUAL: chunks.separated(left, groups, gradients[0])})
    if finite:
        parts = np.split(totals[:-1], np.cumsum([i.size for i in at]))
        for vector, i, part in zip(whole, at, parts[: len(at)], strict=True):
            vector[i] = part
    reduced = chunks.separated(whole, groups, gradients[0])
    number_of = dict(zip(dict.fromkeys(groups), range(len(at)), strict=True))
    tensor_bytes = []
    for spec, group, bits in zip(specs, groups, offset_bits, strict=True):
        number = number_of[group]
        share = fractions.Fraction(spec.elements, max(1, whole[number].size))
        tensor_bytes.append(int(at[number].size * (32 + bits) * share / 8))
    size = len(gradients)
    counted = np.array(tensor_bytes, np.int64)
    return Outcome([reduced] * size, [finite] * size, after, given, [counted] * size)
