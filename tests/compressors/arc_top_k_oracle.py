"""Computes one step of ARC-Top-K in NumPy, for the conformance tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.compressors.lockstep import Arrays, Outcome, State, kept_residuals, sums_of
from tests.reference import arc_top_k
from tf_gradcomp.compressors import ArcTopK
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.policy import GradientSpec


def arc_top_k_oracle(
    compressor: ArcTopK,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
    settings: Sequence[int] | None = None,
) -> Outcome:
    block, rank = compressor.block, compressor.rank
    sent = settings or compressor.settings(specs)
    sums, finite = sums_of(state, gradients)
    size = len(sums)
    given = [
        own if is_finite else [np.zeros_like(array) for array in own]
        for own, is_finite in zip(sums, finite, strict=True)
    ]
    chosen = [
        arc_top_k.choose([arc_top_k.sketch(t, step, block, rank) for t in of_all], of_one)
        if of_one
        else None
        for of_all, of_one in zip(zip(*given, strict=True), sent, strict=True)
    ]

    def taken(own: Arrays) -> Arrays:
        pairs = zip(own, chosen, strict=True)
        return [t.ravel() if c is None else arc_top_k.take(t, c, block) for t, c in pairs]

    def spread(values: Arrays) -> Arrays:
        of_each = zip(values, chosen, specs, strict=True)
        return [
            v.reshape(spec.shape)
            if c is None
            else arc_top_k.spread(v, c, block, np.zeros(spec.shape, np.float32))
            for v, c, spec in of_each
        ]

    values = [taken(own) for own in given]
    payloads = [
        np.concatenate([*own, [0 if is_finite else np.nan]]).astype(np.float32)
        for own, is_finite in zip(values, finite, strict=True)
    ]
    if all(finite):
        totals = [sum(of_all[1:], of_all[0]) for of_all in zip(*values, strict=True)]
        reduced = spread(totals)
        after = [
            [own - part for own, part in zip(of_one, spread(its), strict=True)]
            for of_one, its in zip(sums, values, strict=True)
        ]
    else:
        reduced = [np.zeros(spec.shape, np.float32) for spec in specs]
        after = kept_residuals(state, sums, finite)
    counts = [-(-spec.elements // block) for spec in specs]
    of_each = zip(specs, sent, counts, strict=True)
    tensor_bytes = [
        4 * block * min(s, count) + 2 * rank * count if s else 4 * spec.elements
        for spec, s, count in of_each
    ]
    return Outcome(
        [reduced] * size,
        [all(finite)] * size,
        [{RESIDUAL: residuals} for residuals in after],
        payloads,
        [np.array(tensor_bytes, np.int64)] * size,
    )
