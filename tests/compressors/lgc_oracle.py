"""Computes LGC's steps before its autoencoder is trained, by NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.compressors.lockstep import Arrays, Outcome, State
from tests.reference import lgc
from tests.reference.leader import leader
from tf_gradcomp.compressors import LGC
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.policy import GradientSpec


def lgc_oracle(
    compressor: LGC,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
) -> Outcome:
    layout = compressor.layout(specs)
    size = len(gradients)
    leads = leader(step, size)
    residuals = [
        [array.reshape(-1) for array in replica_values[RESIDUAL]] for replica_values in state
    ]
    values = [
        [a + g.astype(np.float32).reshape(-1) for a, g in zip(residual, given, strict=True)]
        for residual, given in zip(residuals, gradients, strict=True)
    ]
    local_finite = [
        all(np.isfinite(replica_values).all() for replica_values in all_values)
        for all_values in values
    ]
    indices = {
        index: lgc.largest(values[leads][index], layout.entries[index])
        if local_finite[leads]
        else np.zeros(layout.entries[index], int)
        for index in layout.selected
    }
    order = [*layout.whole, *layout.plain, *layout.coded]
    given = []
    for replica_values, finite in zip(values, local_finite, strict=True):
        sent = [replica_values[index][indices.get(index, slice(None))] for index in order]
        sent = np.concatenate([*sent, np.zeros(0, np.float32)])
        flag = np.float32(0 if finite else np.nan)
        given.append(np.append(sent if finite else np.zeros_like(sent), flag))
    total = given[0]
    for other in given[1:]:
        total = total + other
    finite, sent = bool(np.isfinite(total).all()), all(local_finite)
    reduced, after = [np.zeros_like(replica_values) for replica_values in values[0]], []
    start = 0
    for index in order if finite else []:
        where = indices.get(index, np.arange(values[0][index].size))
        reduced[index][where] = total[start : start + where.size]
        start += where.size
    for replica_values, residual, is_finite in zip(values, residuals, local_finite, strict=True):
        left = [array.copy() for array in (replica_values if is_finite else residual)]
        for index in order if sent else []:
            left[index][indices.get(index, slice(None))] = 0
        after.append({RESIDUAL: [a.reshape(s.shape) for a, s in zip(left, specs, strict=True)]})
    tensor_bytes = np.array(
        [
            int(4 * lgc.packed(indices[index], spec.elements).size / size + 4 * indices[index].size)
            if index in indices
            else 4 * spec.elements
            for index, spec in enumerate(specs)
        ],
        np.int64,
    )
    shaped = [array.reshape(spec.shape) for array, spec in zip(reduced, specs, strict=True)]
    return Outcome([shaped] * size, [finite] * size, after, given, [tensor_bytes] * size)
