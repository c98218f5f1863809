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
    residuals = [[array.reshape(-1) for array in of_one[RESIDUAL]] for of_one in state]
    values = [
        [a + g.astype(np.float32).reshape(-1) for a, g in zip(kept, given, strict=True)]
        for kept, given in zip(residuals, gradients, strict=True)
    ]
    own_finite = [all(np.isfinite(of_one).all() for of_one in of_all) for of_all in values]
    places = {
        place: lgc.largest(values[leads][place], layout.entries[place], compressor.order)
        if own_finite[leads]
        else np.zeros(layout.entries[place], int)
        for place in layout.selected
    }
    order = [*layout.whole, *layout.plain, *layout.coded]
    given = []
    for of_one, finite in zip(values, own_finite, strict=True):
        sent = [of_one[place][places.get(place, slice(None))] for place in order]
        sent = np.concatenate([*sent, np.zeros(0, np.float32)])
        flag = np.float32(0 if finite else np.nan)
        given.append(np.append(sent if finite else np.zeros_like(sent), flag))
    total = given[0]
    for other in given[1:]:
        total = total + other
    finite, sent = bool(np.isfinite(total).all()), all(own_finite)
    reduced, after = [np.zeros_like(of_one) for of_one in values[0]], []
    start = 0
    for place in order if finite else []:
        where = places.get(place, np.arange(values[0][place].size))
        reduced[place][where] = total[start : start + where.size]
        start += where.size
    for of_one, kept, is_finite in zip(values, residuals, own_finite, strict=True):
        left = [array.copy() for array in (of_one if is_finite else kept)]
        for place in order if sent else []:
            left[place][places.get(place, slice(None))] = 0
        after.append({RESIDUAL: [a.reshape(s.shape) for a, s in zip(left, specs, strict=True)]})
    tensor_bytes = np.array(
        [
            int(4 * lgc.packed(places[place], spec.elements).size / size + 4 * places[place].size)
            if place in places
            else 4 * spec.elements
            for place, spec in enumerate(specs)
        ],
        np.int64,
    )
    shaped = [array.reshape(spec.shape) for array, spec in zip(reduced, specs, strict=True)]
    return Outcome([shaped] * size, [finite] * size, after, given, [tensor_bytes] * size)
