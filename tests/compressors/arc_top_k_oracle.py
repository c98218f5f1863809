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
    all_totals = [
        local if is_finite else [np.zeros_like(array) for array in local]
        for local, is_finite in zip(sums, finite, strict=True)
    ]
    chosen = [
        arc_top_k.choose([arc_top_k.sketch(t, step, block, rank) for t in totals], rank_sent)
        if rank_sent
        else None
        for totals, rank_sent in zip(zip(*all_totals, strict=True), sent, strict=True)
    ]

    def taken(local: Arrays) -> Arrays:
        pairs = zip(local, chosen, strict=True)
        return [t.ravel() if c is None else arc_top_k.take(t, c, block) for t, c in pairs]

    def spread(values: Arrays) -> Arrays:
        rows = zip(values, chosen, specs, strict=True)
        return [
            v.reshape(spec.shape)
            if c is None
            else arc_top_k.spread(v, c, block, np.zeros(spec.shape, np.float32))
            for v, c, spec in rows
        ]

    values = [taken(local) for local in all_totals]
    payloads = [
        np.concatenate([*local, [0 if is_finite else np.nan]]).astype(np.float32)
        for local, is_finite in zip(values, finite, strict=True)
    ]
    if all(finite):
        totals = [sum(totals[1:], totals[0]) for totals in zip(*values, strict=True)]
        reduced = spread(totals)
        after = [
            [local - part for local, part in zip(rank_sent, spread(its), strict=True)]
            for rank_sent, its in zip(sums, values, strict=True)
        ]
    else:
        reduced = [np.zeros(spec.shape, np.float32) for spec in specs]
        after = kept_residuals(state, sums, finite)
    counts = [-(-spec.elements // block) for spec in specs]
    rows = zip(specs, sent, counts, strict=True)
    tensor_bytes = [
        4 * block * min(s, count) + 2 * rank * count if s else 4 * spec.elements
        for spec, s, count in rows
    ]
    return Outcome(
        [reduced] * size,
        [all(finite)] * size,
        [{RESIDUAL: residuals} for residuals in after],
        payloads,
        [np.array(tensor_bytes, np.int64)] * size,
    )
